"""Upcycling (Komatsuzaki et al. 2023): begin a model with experts from a dense model's weights.

Each expert begins as a copy of the MLP that it replaces. As long as the gates of a token's experts sum to
one, the new model computes what the dense one does, whatever its routers choose; `config/rules/experts.py`
holds the conditions. The new routers send different tokens to different experts, which so grow apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from torch import Tensor

from megazero.checkpoint.box import Box
from megazero.checkpoint.part import WEIGHT, Key, Part, Source
from megazero.config.derive import EXPERT_FIELDS
from megazero.config.tree.model import ModelConfig
from megazero.spec.model import ModelSpec

_MATRICES = ("up", "down")
_KINDS = ("weight", "bias")


def dense_model(model: ModelConfig) -> ModelConfig:
    """The model with an MLP in place of each layer's experts."""
    defaults = {name: ModelConfig.model_fields[name].default for name in EXPERT_FIELDS}
    return model.model_copy(update=defaults)


def router_names(spec: ModelSpec) -> tuple[str, ...]:
    """The weights of routers, which a dense model has not."""
    kinds = ("weight", "logit_bias") if spec.router is not None and spec.router.bias else ("weight",)
    return tuple(f"layers.{layer}.mlp.router.{kind}" for layer in spec.expert_layers for kind in kinds)


class Upcycled:
    """A `Source` of all weights of a model with experts, except its routers'.

    Args:
        source: the weights of the `dense_model`; other kinds are left out.
        spec: the model with experts.

    Attributes:
        shapes: logical tensor -> its shape.
    """

    def __init__(self, source: Source, spec: ModelSpec):
        self._source = source
        self._copied: dict[Key, Key] = {}
        shapes = {key: tuple(shape) for key, shape in source.shapes.items() if key.kind == WEIGHT}
        for layer in spec.expert_layers:
            for name in (f"{matrix}.{kind}" for matrix in _MATRICES for kind in _KINDS):
                dense, expert = Key(f"layers.{layer}.mlp.{name}"), Key(f"layers.{layer}.mlp.experts.{name}")
                if dense in shapes:
                    shapes[expert] = (spec.every_layer[layer].experts, *shapes.pop(dense))
                    self._copied[expert] = dense
        self.shapes: Mapping[Key, tuple[int, ...]] = MappingProxyType(shapes)

    def read(self, parts: Iterable[Part]) -> None:
        """Fill the memory of parts; see `Source`. The dense weight is read once and copied to all experts."""
        wanted: list[Part] = []
        stacked: list[Tensor] = []
        for part in parts:
            if part.key not in self._copied:
                wanted.append(part)
            elif part.box.numel:
                box = Box(part.box.offset[1:], part.box.shape[1:])
                wanted.append(Part(self._copied[part.key], part.shape[1:], box, part.tensor[0]))
                stacked.append(part.tensor)
        self._source.read(wanted)
        for tensor in stacked:
            tensor[1:] = tensor[0]


_: type[Source] = Upcycled
