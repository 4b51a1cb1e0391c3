"""Whole weights of an engine's module, and `state_dict` of a module whose weights are sharded."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from megazero.checkpoint.part import Key, Part, Source
from megazero.checkpoint.saver import together
from megazero.checkpoint.tensor_file import Later
from megazero.deepspeed.engine.state import EngineState
from megazero.deepspeed.moe.experts import names_on_ranks
from megazero.deepspeed.tensor_parallel.layers import whole_value
from megazero.deepspeed.tensor_parallel.slices import sliced_of
from megazero.deepspeed.weights_file import write_weights
from megazero.deepspeed.zero.gathered import GatheredParameters
from megazero.formats.hf.stream import WeightStream
from megazero.mpu.context import ParallelContext
from megazero.mpu.messages import gather_values


def module_state(
    engine: EngineState, exclude_frozen: bool = False, *, keep: bool = True
) -> dict[str, Tensor]:
    """The module's whole `state_dict` on the CPU; every rank calls this. For arguments, see `module_stream`.

    The names of a tied parameter have one tensor. A rank that does not `keep` gets an empty dictionary.
    """
    stream, names = module_stream(engine, exclude_frozen, keep=keep)
    tensors = dict(stream)
    return {name: tensors[own] for name, own in names.items()} if keep else {}


def module_stream(
    engine: EngineState, exclude_frozen: bool = False, *, keep: bool = True
) -> tuple[WeightStream, dict[str, str]]:
    """The distinct tensors of the module's whole `state_dict`, each gathered when its turn comes.

    Every rank calls this and iterates.

    Args:
        engine: the engine's state.
        exclude_frozen: leave out frozen parameters.
        keep: whether this rank is given the tensors.

    Returns:
        The stream, and name in the `state_dict` -> name in the stream, which differ for tied parameters. Of
        what several pipeline stages hold, it is the first one's.
    """
    context, own = engine.context, engine.module.state_dict(keep_vars=True)
    frozen = frozen_names(engine.module) if exclude_frozen else set()
    held: list[tuple[str, str, str, list[int], str, int | None]] = []
    firsts: dict[int, str] = {}
    for name, value in own.items():
        if not isinstance(value, Tensor) or name in frozen:
            continue
        sliced = sliced_of(value)
        shape = list(value.shape if sliced is None else sliced.shape)
        for whole_name, rank in names_on_ranks(name, engine.module, context):
            first = whole_name if rank is not None else firsts.setdefault(id(value), name)
            held.append((whole_name, first, name, shape, str(value.dtype).removeprefix("torch."), rank))
    laters: dict[str, Later] = {}
    names: dict[str, str] = {}
    for stage, rows in enumerate(gather_values(context.pp, held, context.device)):
        for whole_name, first, name, shape, dtype, rank in rows:
            if names.setdefault(whole_name, first) == whole_name and whole_name not in laters:
                place = _Place(context, stage, rank)
                value = own[name] if stage == context.pp.rank else None
                make = partial(place.fetch, value, getattr(torch, dtype), shape)
                laters[whole_name] = Later(getattr(torch, dtype), tuple(shape), make)
    return WeightStream(laters.items(), yields=keep), names


@dataclass(frozen=True)
class _Place:
    """The ranks that hold a tensor.

    Attributes:
        context: this rank.
        stage: the pipeline stage.
        experts: the expert-parallel rank; None if all of them hold it.
    """

    context: ParallelContext
    stage: int
    experts: int | None

    @torch.no_grad()
    def fetch(self, value: Tensor | None, dtype: torch.dtype, shape: list[int]) -> Tensor:
        """The whole tensor on the CPU; every rank calls this.

        Args:
            value: on the ranks of the stage, their slice of it or of their own expert in its place.
            dtype, shape: those of the whole tensor.
        """
        context, whole = self.context, None
        if value is not None and self.experts in (None, context.groups["ep"].rank):
            with GatheredParameters(value):
                whole = whole_value(value, context.tp).clone().contiguous()
        if whole is None:
            whole = torch.empty(shape, dtype=dtype, device=context.device)
        if value is not None and self.experts is not None:
            context.groups["ep"].broadcast(whole, self.experts).wait()
        if context.pp.size > 1:
            context.pp.broadcast(whole, self.stage).wait()
        return whole.cpu()


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
    """Write the module's whole `state_dict` to a file; every rank calls this, and none holds it whole.

    Raises:
        CheckpointError: on every rank: it cannot be written.
    """
    stream, names = module_stream(engine, exclude_frozen, keep=engine.context.rank == 0)

    def work() -> None:
        try:
            if stream.yields:
                write_weights(path, stream.laters, names)
        finally:
            stream.finish()

    together(engine.context, work, f"write {path}")


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
