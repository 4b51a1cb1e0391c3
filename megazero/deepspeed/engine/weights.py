"""Whole weights of an engine's module, and `state_dict` of a module whose weights are sharded."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from megazero.checkpoint.part import Key, Part, Source
from megazero.checkpoint.saver import together
from megazero.deepspeed.engine.state import EngineState
from megazero.deepspeed.moe.experts import with_all_experts
from megazero.deepspeed.tensor_parallel.layers import whole_value
from megazero.deepspeed.zero.gathered import GatheredParameters
from megazero.deepspeed.zero_to_fp32 import write_state
from megazero.mpu.context import ParallelContext
from megazero.mpu.messages import gather_values


def module_state(
    engine: EngineState, exclude_frozen: bool = False, *, keep: bool = True
) -> dict[str, Tensor]:
    """The module's whole `state_dict` on the CPU, gathered parameter by parameter; every rank calls this.

    Args:
        engine: the engine's state.
        exclude_frozen: leave out frozen parameters.
        keep: whether this rank wants the result; without it the rank takes part, and gets an empty one.
    """
    state: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}
    frozen = frozen_names(engine.module) if exclude_frozen else set()
    groups = engine.context.groups
    sends = groups["ep"].size > 1 or groups["pp"].size > 1
    for name, value in engine.module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or name in frozen:
            continue
        if id(value) not in copies:  # tied weights stay one tensor
            with GatheredParameters(value):
                whole = whole_value(value, engine.context.tp)
                copies[id(value)] = whole.clone().cpu() if keep or sends else whole.new_empty(0)
        state[name] = copies[id(value)]
    state = whole_state(with_all_experts(state, engine.module, engine.context), engine.context)
    return state if keep else {}


def frozen_names(module: nn.Module) -> set[str]:
    """The names of frozen parameters; of a tied parameter, all its names."""
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, param in named if not param.requires_grad}


def shared_names(module: nn.Module) -> dict[str, str]:
    """Other name of a tied parameter -> its first name."""
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: own for name, param in named if (own := first.setdefault(id(param), name)) != name}


def save_module(engine: EngineState, path: Path, exclude_frozen: bool) -> None:
    """Write `module_state` to a file; every rank calls this.

    Raises:
        CheckpointError: it cannot be written.
    """
    first = engine.context.rank == 0
    state = module_state(engine, exclude_frozen, keep=first)

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_state(state, path)

    together(engine.context, write if first else None, f"write {path}")


class StateSource:
    """A `state_dict` as a `Source`.

    Args:
        state: whole tensors by name.

    Attributes:
        shapes: the shapes of the tensors.
    """

    def __init__(self, state: Mapping[str, object]):
        self._state = {Key(name): value for name, value in state.items() if isinstance(value, Tensor)}
        self.shapes = {key: tuple(value.shape) for key, value in self._state.items()}

    def tensor(self, key: Key) -> Tensor:
        """The whole tensor of a key."""
        return self._state[key]

    def read(self, parts: Iterable[Part]) -> None:
        """Copy the values of parts into their memory; see `Source`."""
        for part in parts:
            part.tensor.copy_(self._state[part.key][part.box.slices])


_: type[Source] = StateSource


def empty_state_dict(module: nn.Module) -> None:
    """Let `state_dict` return empty tensors for sharded weights, with a warning, as DeepSpeed does.

    `state_dict` cannot gather them, because every rank must take part in a gather. Within
    `GatheredParameters` weights are whole, and with `keep_vars` they are the parameters themselves. A module
    gets this hook once, even if it has several engines.
    """
    for part in module.modules():
        if _empty_absent not in part._state_dict_hooks.values():
            part.register_state_dict_post_hook(_empty_absent)


def _empty_absent(part: nn.Module, state: dict[str, object], prefix: str, local_metadata: object) -> None:
    for name, param in part._parameters.items():
        value = state.get(f"{prefix}{name}")
        if param is None or value is None or value is param:
            continue
        # A sharded parameter has its shape alone: all its elements are one, so its strides are 0.
        if param.dim() > 0 and param.numel() > 0 and not any(param.stride()):
            state[f"{prefix}{name}"] = param.detach().new_empty(0)
            warnings.warn(
                "`state_dict` gives empty tensors for weights that are sharded over the ranks at stage 3; "
                "call `engine.module_state_dict()` on every rank, or enter "
                "`zero.GatheredParameters(module.parameters())` first",
                stacklevel=2,
            )


def whole_state(own: Mapping[str, Tensor], context: ParallelContext) -> dict[str, Tensor]:
    """Merge the states of all pipeline stages, on the CPU; every rank calls this.

    A tensor that several stages hold is the first one's.
    """
    if context.pp.size == 1:
        return dict(own)
    described = [(name, list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in own.items()]
    state: dict[str, Tensor] = {}
    for stage, items in enumerate(gather_values(context.pp, described, context.device)):
        for name, shape, dtype in items:
            if stage == context.pp.rank:
                tensor = own[name].to(context.device).contiguous()
            else:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=context.device)
            context.pp.broadcast(tensor, stage).wait()
            state.setdefault(name, tensor.cpu())
    return state
