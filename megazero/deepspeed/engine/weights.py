"""Whole weights of an engine's module: taken out for use elsewhere, and put in."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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
    """The module's `state_dict`, whole, on the CPU, one parameter after another; every rank calls this.

    Args:
        engine: what the parts of the module's engine share.
        exclude_frozen: leave out parameters that are not trained.
        keep: whether this rank wants it; the others only take part, and get an empty one.
    """
    state: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}
    frozen = frozen_names(engine.module) if exclude_frozen else set()
    groups = engine.context.groups
    passed_on = groups["ep"].size > 1 or groups["pp"].size > 1
    for name, value in engine.module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or name in frozen:
            continue
        if id(value) not in copies:  # tied weights stay one tensor
            with GatheredParameters(value):
                whole = whole_value(value, engine.context.tp)
                copies[id(value)] = whole.clone().cpu() if keep or passed_on else whole.new_empty(0)
        state[name] = copies[id(value)]
    state = whole_state(with_all_experts(state, engine.module, engine.context), engine.context)
    return state if keep else {}


def frozen_names(module: nn.Module) -> set[str]:
    """The names of the parameters that are not trained, each of a tied one's too."""
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, param in named if not param.requires_grad}


def shared_names(module: nn.Module) -> dict[str, str]:
    """Other name of a tied parameter -> its first name."""
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: kept for name, param in named if (kept := first.setdefault(id(param), name)) != name}


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
        shapes: their shapes.
    """

    def __init__(self, state: Mapping[str, Any]):
        self._state = {Key(name): value for name, value in state.items() if isinstance(value, Tensor)}
        self.shapes = {key: tuple(value.shape) for key, value in self._state.items()}

    def tensor(self, key: Key) -> Tensor:
        """A whole tensor."""
        return self._state[key]

    def read(self, parts: Iterable[Part]) -> None:
        """Fill the memory of parts; see `Source`."""
        for part in parts:
            part.tensor.copy_(self._state[part.key][part.box.slices])


_: type[Source] = StateSource


def empty_state_dict(module: nn.Module) -> None:
    """Let `state_dict` give empty tensors for sharded weights, with a warning, as DeepSpeed does.

    Every rank must take part in gathering, so it cannot do that by itself. Weights within
    `GatheredParameters` are whole, and those that `keep_vars` asks for are the parameters themselves. A
    module of several engines has this hook once.
    """
    for part in module.modules():
        if _empty_absent not in part._state_dict_hooks.values():
            part.register_state_dict_post_hook(_empty_absent)


def _empty_absent(part: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name, param in part._parameters.items():
        value = state.get(f"{prefix}{name}")
        if param is not None and value is not None and value is not param and _is_absent(param):
            state[f"{prefix}{name}"] = param.detach().new_empty(0)
            warnings.warn(
                "`state_dict` gives empty tensors for weights that are sharded over the ranks at stage 3; "
                "call `engine.module_state_dict()` on every rank, or enter "
                "`zero.GatheredParameters(module.parameters())` first",
                stacklevel=2,
            )


def _is_absent(param: nn.Parameter) -> bool:
    """Whether a parameter only has its shape: all its elements are one."""
    return param.dim() > 0 and param.numel() > 0 and not any(param.stride())


def whole_state(mine: Mapping[str, Tensor], context: ParallelContext) -> dict[str, Tensor]:
    """The states of all stages together, on the CPU; every rank calls this.

    Of what several stages hold, the first one's counts.
    """
    if context.pp.size == 1:
        return dict(mine)
    described = [(name, list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in mine.items()]
    state: dict[str, Tensor] = {}
    for stage, items in enumerate(gather_values(context.pp, described, context.device)):
        for name, shape, dtype in items:
            if stage == context.pp.rank:
                tensor = mine[name].to(context.device).contiguous()
            else:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=context.device)
            context.pp.broadcast(tensor, stage).wait()
            state.setdefault(name, tensor.cpu())
    return state
