"""`StageLayers`: build the layers of one stage, run them in order, and recompute groups of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megazero.deepspeed.pipe.specs import Layer, LayerSpec, TiedLayerSpec, name_of
from megazero.errors import ConfigError

LayerFunction = Callable[[Any], object]
"""Computes a layer's output from its input."""

recompute = partial(checkpoint, use_reentrant=False)
"""Calls a function without keeping its activations, and recomputes it in backward."""

# Of Megatron's GPT models only these layers are recomputed, because embeddings must not be.
_GPT = ("GPTModelPipe", "GPT2ModelPipe")
_GPT_LAYER = "ParallelTransformerLayerPipe"


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # layers of users may draw from it
    torch.manual_seed(seed % 2**63)


class StageLayers(nn.Module):
    """The layers of one stage, named by their numbers in the whole model.

    Attributes:
        forward_funcs: the function of each layer.
        fwd_map: name of a layer -> its index in `forward_funcs`.
        tied_modules: key -> the module that layers share.
        activation_checkpoint_interval: the number of layers that are recomputed together; 0 recomputes none.
        activation_checkpoint_func: calls a function and recomputes it in backward.
        checkpointable_layers: names of the classes whose layers may be recomputed; None for all.
        seed_layers: whether each layer is seeded.
        seed_fn: called with a seed; None for `seed_everything`.
        base_seed: the first layer's seed.
        micro_offset: calls of forward so far.
    """

    activation_checkpoint_interval: int
    activation_checkpoint_func: Callable[..., object]
    checkpointable_layers: Sequence[str] | None
    seed_layers: bool
    seed_fn: Callable[[int], object] | None
    base_seed: int

    def __init__(self) -> None:
        super().__init__()
        self.forward_funcs: list[LayerFunction] = []
        self.fwd_map: dict[str, int] = {}
        self.tied_modules = nn.ModuleDict()
        self.tied_weight_attrs: dict[str, list[str]] = {}
        self.micro_offset = 0
        self._local_start = 0

    def build_layers(self, layers: Sequence[Layer], first: int) -> None:
        """Build layers; `first` is the number of the first one in the whole model.

        Raises:
            ConfigError: a layer cannot be called, or a tied module lacks a `tied_weight_attr`.
        """
        self._local_start = first
        for number, layer in enumerate(layers, first):
            if self.seed_layers:
                (self.seed_fn or seed_everything)(self.base_seed + number)
            if isinstance(layer, TiedLayerSpec):
                self.forward_funcs.append(self._tied(layer))
            elif isinstance(layer, (LayerSpec, nn.Module)):
                module = layer.build() if isinstance(layer, LayerSpec) else layer
                self.fwd_map[str(number)] = len(self.forward_funcs)
                self.forward_funcs.append(module)
                self.add_module(str(number), module)
            elif callable(layer):
                self.forward_funcs.append(layer)
            else:
                raise ConfigError(
                    f"`layers` must hold modules, specs and functions, but layer {number} is a "
                    f"{type(layer).__name__}; wrap it"
                )

    def _tied(self, spec: TiedLayerSpec) -> LayerFunction:
        if spec.key not in self.tied_modules:
            module = spec.build()
            for name in spec.tied_weight_attr:
                weight_of(module, name, spec.key)
            self.tied_modules[spec.key] = module
            self.tied_weight_attrs[spec.key] = spec.tied_weight_attr
        module = self.tied_modules[spec.key]
        return module if spec.forward_fn is None else partial(spec.forward_fn, module)

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute this many layers together from now on; 0 recomputes none.

        Raises:
            ConfigError: it is negative.
        """
        if interval < 0:
            raise ConfigError(f"`interval` must be at least 0, but is {interval}; 0 recomputes nothing")
        self.activation_checkpoint_interval = interval

    def forward(self, forward_input: object) -> object:
        """Run this stage's layers in order."""
        self.micro_offset += 1
        interval = self.activation_checkpoint_interval or len(self.forward_funcs) or 1
        x = forward_input
        for start in range(0, len(self.forward_funcs), interval):
            funcs = self.forward_funcs[start : start + interval]
            run = partial(self._run, funcs, self._local_start + start, self.micro_offset + 1)
            if self.activation_checkpoint_interval and torch.is_grad_enabled() and self._recomputes(funcs):
                x = self.activation_checkpoint_func(run, *(x if isinstance(x, tuple) else (x,)))
            else:
                x = run(x)
        return x

    def _run(self, funcs: Sequence[LayerFunction], first: int, offset: int, *inputs: object) -> object:
        """Run some layers; `first` is the number of the first one, and `offset` that of the micro-batch."""
        x = inputs[0] if len(inputs) == 1 else inputs
        for number, layer in enumerate(funcs, first):
            if self.seed_layers:  # the same seed in a recomputation
                (self.seed_fn or seed_everything)(self.base_seed * offset + number)
            x = layer(x)
        return x

    def _recomputes(self, funcs: Sequence[LayerFunction]) -> bool:
        """Whether these layers may be recomputed."""
        names = None if self.checkpointable_layers is None else set(self.checkpointable_layers)
        if type(self).__name__ in _GPT:
            names = (names or set()) | {_GPT_LAYER}
        if names is not None:
            return all(type(func).__name__ in names for func in funcs)
        return any(isinstance(func, nn.Module) and any(True for _ in func.parameters()) for func in funcs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each layer with torch; the arguments are those of `torch.compile`."""
        for place, layer in enumerate(self.forward_funcs):
            if isinstance(layer, nn.Module):
                layer.compile(*args, **kwargs)
            else:
                self.forward_funcs[place] = torch.compile(layer, *args, **kwargs)

    @property
    def last_layer(self) -> str:
        """The number and class of the last layer, for messages."""
        if not self.forward_funcs:
            return "an empty stage"
        number = self._local_start + len(self.forward_funcs) - 1
        func = self.forward_funcs[-1]
        func = func.func if isinstance(func, partial) else func
        return f"layer {number} ({name_of(func) or type(func).__name__})"


def weight_of(module: nn.Module, name: str, key: str) -> nn.Parameter:
    """The parameter of a tied module with this name, such as ``weight`` or ``norm.weight``.

    Raises:
        ConfigError: it has none.
    """
    weight: object = module
    for part in name.split("."):
        weight = getattr(weight, part, None)
    if not isinstance(weight, nn.Parameter):
        raise ConfigError(
            f"`tied_weight_attr` must name parameters of the module of {key!r}, but its "
            f"{type(module).__name__} has no {name!r}; it has "
            f"{', '.join(own for own, _ in module.named_parameters()) or 'none'}"
        )
    return weight
