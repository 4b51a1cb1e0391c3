"""The states of DeepSpeed's optimizers: masters and moments of each parameter, cut from flat vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megazero.checkpoint.part import WEIGHT
from megazero.errors import CheckpointError
from megazero.formats.deepspeed.facts import count_updates
from megazero.formats.deepspeed.files import TagFiles
from megazero.formats.deepspeed.pickles import load_states
from megazero.formats.deepspeed.vectors import (
    Joined,
    Scale,
    Shapes,
    cut_parameters,
    cut_vector,
    group_state,
    joined_states,
    tensors_of,
    vector_of,
)
from megazero.formats.pickles import Saved

Splitter = Callable[[Sequence[Tensor]], Iterator[tuple[str, Joined]]]
"""Splits the ranks' vectors into (parameter, tensor)."""


@dataclass(frozen=True)
class OptimizerStates:
    """The state of an optimizer.

    Attributes:
        tensors: (parameter, kind) -> its master weight or a moment.
        groups: the parameter groups.
        updates: the number of updates.
        scale: the dynamic loss scale, or None.
    """

    tensors: Mapping[tuple[str, str], Joined] = field(default_factory=dict)
    groups: Sequence[Saved] = ()
    updates: int = 0
    scale: Scale | None = None


def read_sharded(files: TagFiles, rank: int, model: Saved) -> OptimizerStates:
    """Read the state of stages 1 to 3 from the files of all data-parallel ranks.

    Args:
        files: the checkpoint's files.
        rank: the model-parallel rank.
        model: the content of its model file, which lists the parameters in the order of the vectors.

    Raises:
        DamagedCheckpointError: a rank's file is missing, or does not fit the others.
        CheckpointError: a file holds something that is not supported.
    """
    first = load_states(next(path for (of, _), path in files.optimizer.items() if of == rank))
    saved = first["optimizer_state_dict"]
    counts = saved.get("partition_count", model.get("dp_world_size"))
    count = max(counts) if isinstance(counts, (list, tuple)) else int(counts)
    paths = files.of_optimizer(rank, count)
    every = [load_states(path)["optimizer_state_dict"] for path in paths]
    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in model["param_shapes"]]
    base = saved["optimizer_state_dict" if "fp32_flat_groups" in saved else "base_optimizer_state"]
    if not isinstance(base, Mapping):  # elastic checkpoints have a list of states, one for each parameter
        base = {"state": [state for one in base for state in (one if isinstance(one, list) else [one])]}
    groups = base.get("param_groups", ())
    updates = count_updates(base.get("state", {}), groups)
    return OptimizerStates(join_ranks(every, shapes), groups, updates, Scale.of(saved))


def join_ranks(ranks: Sequence[Saved], shapes: Sequence[Shapes]) -> dict[tuple[str, str], Joined]:
    """Join the masters and moments of a model-parallel rank: (parameter, kind) -> tensor.

    Args:
        ranks: the ``optimizer_state_dict`` in the file of each data-parallel rank.
        shapes: the parameters of each group, in the order of the vectors.

    Raises:
        DamagedCheckpointError: a vector is too short.
    """
    tensors: dict[tuple[str, str], Joined] = {}
    if "fp32_flat_groups" in ranks[0]:  # stage 3
        # Its vectors are cut into sub-groups of limited size, whatever the parameter groups are.
        together = {name: shape for group in shapes for name, shape in group.items()}
        masters = [torch.cat([vector_of(part) for part in one["fp32_flat_groups"]]) for one in ranks]
        states = [joined_states(one["optimizer_state_dict"]["state"]) for one in ranks]
        _take(tensors, masters, states, partial(cut_parameters, shapes=together))
        return tensors
    gaps = ranks[0].get("param_alignment_paddings") or [()] * len(shapes)
    for number, group in enumerate(shapes):
        masters = [vector_of(one["single_partition_of_fp32_groups"][number]) for one in ranks]
        states = [group_state(one["base_optimizer_state"], number) for one in ranks]
        _take(tensors, masters, states, partial(cut_vector, shapes=group, gaps=gaps[number]))
    return tensors


def read_unsharded(saved: Saved | None, groups: Sequence[Shapes], folder: Path) -> OptimizerStates | None:
    """Read the state of stage 0, which numbers parameters instead of naming them, from the model file.

    Args:
        saved: the optimizer's entry there: torch's own state, or that of a wrapper with fp32 masters.
        groups: the parameters of each group, in order.
        folder: the checkpoint's folder, for messages.

    Raises:
        CheckpointError: the saved groups have other parameters.
    """
    if not saved or not groups:
        return None
    wrapped = "optimizer_state_dict" in saved
    inner = saved["optimizer_state_dict"] if wrapped else saved
    masters = saved.get("fp32_groups_flat")
    tensors: dict[tuple[str, str], Joined] = {}
    if masters is not None:
        _check_sizes([sum(map(math.prod, group.values())) for group in groups], masters, folder)
        for number, group in enumerate(groups):
            state = tensors_of(inner["state"].get(number, {}))
            _take(tensors, [vector_of(masters[number])], [state], partial(cut_vector, shapes=group))
    else:
        named = [(name, shape) for group in groups for name, shape in group.items()]
        numbers = [number for group in inner["param_groups"] for number in group["params"]]
        whole = [value for group in saved.get("fp32_groups", ()) for value in group]
        if len(named) != len(numbers):
            raise _other_groups(folder, f"{len(numbers)} parameters", f"{len(named)}")
        _check_sizes([math.prod(shape) for _, shape in named], whole or [None] * len(named), folder)
        for at, ((name, shape), number) in enumerate(zip(named, numbers, strict=True)):
            state = tensors_of(inner["state"].get(number, {}))
            values = state if not whole else {WEIGHT: whole[at], **state}
            for kind, value in values.items():
                _check_sizes([math.prod(shape)], [value], folder)
                tensors[name, kind] = Joined(tuple(shape), (vector_of(value),))
    updates = count_updates(inner["state"], inner["param_groups"])
    return OptimizerStates(tensors, inner["param_groups"], updates, Scale.of(saved) if wrapped else None)


def _take(
    into: dict[tuple[str, str], Joined],
    masters: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    split: Splitter,
) -> None:
    """Split the ranks' vectors of masters and of each moment, and add the tensors to `into`."""
    for name, joined in split(masters):
        into[name, WEIGHT] = joined
    for kind in states[0]:
        for name, joined in split([state[kind] for state in states]):
            into[name, kind] = joined


def _check_sizes(sizes: Sequence[int], saved: Sequence[Tensor | None], folder: Path) -> None:
    stored = [None if value is None else value.numel() for value in saved]
    if len(sizes) != len(stored) or any(t not in (None, s) for s, t in zip(sizes, stored, strict=True)):
        raise _other_groups(folder, f"sizes {stored}", f"{list(sizes)}")


def _other_groups(folder: Path, stored: str, present: str) -> CheckpointError:
    return CheckpointError(
        f"`{folder}` must be of an optimizer with the same parameter groups, but has {stored} where this "
        f"one has {present}; build the groups as they were, or load with load_optimizer_states=False"
    )
