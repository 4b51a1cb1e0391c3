"""Masters and moments out of the flat vectors of DeepSpeed's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.part import WEIGHT
from megazero.deepspeed.checkpoint.facts import count_updates
from megazero.deepspeed.checkpoint.files import Files
from megazero.deepspeed.checkpoint.pickles import load_states
from megazero.errors import CheckpointError
from megazero.formats.megatron.universal import optimizer_facts, parameter_files
from megazero.formats.megatron.zero_states import (
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

Cut = Callable[[Sequence[Tensor]], Iterator[tuple[str, Joined]]]


@dataclass(frozen=True)
class OptimizerStates:
    """The content of an optimizer.

    Attributes:
        tensors: (parameter, kind) -> its master weight or a moment.
        groups: its parameter groups.
        updates: how many updates it made.
        scale: its dynamic loss scale.
    """

    tensors: Mapping[tuple[str, str], Joined] = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] = ()
    updates: int = 0
    scale: Scale | None = None


def read_sharded(files: Files, rank: int, model: Mapping[str, Any]) -> OptimizerStates:
    """The states of stages 1 to 3 from the files of all data-parallel ranks.

    Args:
        files: the checkpoint's files.
        rank: the model-parallel rank.
        model: its file of the model, which says how parameters lie in the vectors.

    Raises:
        DamagedCheckpointError: a rank's file is missing, or does not fit the others.
        CheckpointError: it holds something that is not read here.
    """
    first = load_states(next(path for (of, _), path in files.optimizer.items() if of == rank))
    saved = first["optimizer_state_dict"]
    counts = saved.get("partition_count", model.get("dp_world_size"))
    count = max(counts) if isinstance(counts, (list, tuple)) else int(counts)
    paths = files.of_optimizer(rank, count)
    every = [load_states(path)["optimizer_state_dict"] for path in paths]
    shapes: list[Shapes] = [
        {name: tuple(shape) for name, shape in group.items()} for group in model["param_shapes"]
    ]
    tensors: dict[tuple[str, str], Joined] = {}
    if "fp32_flat_groups" in saved:
        together = {name: shape for group in shapes for name, shape in group.items()}
        inner = [entry["optimizer_state_dict"] for entry in every]
        _take(
            tensors,
            [torch.cat([vector_of(part) for part in entry["fp32_flat_groups"]]) for entry in every],
            [joined_states(entry["state"]) for entry in inner],
            lambda slices: cut_parameters(slices, together),
        )
        base = inner[0]
    else:
        bases = [entry["base_optimizer_state"] for entry in every]
        gaps = saved.get("param_alignment_paddings") or [()] * len(shapes)
        for number, group in enumerate(shapes):
            _take(
                tensors,
                [vector_of(entry["single_partition_of_fp32_groups"][number]) for entry in every],
                [group_state(entry, number) for entry in bases],
                lambda slices, group=group, number=number: cut_vector(slices, group, gaps[number]),  # type: ignore[misc]
            )
        base = bases[0] if isinstance(bases[0], Mapping) else {"state": _elastic_steps(bases[0])}
    groups = base.get("param_groups", ())
    updates = count_updates(base.get("state", {}), groups)
    return OptimizerStates(tensors, groups, updates, Scale.of(saved))


def read_unsharded(saved: Any, groups: Sequence[Shapes], folder: Path) -> OptimizerStates | None:
    """The states of stage 0 from the file of the model, in which parameters have no names.

    Args:
        saved: the optimizer's entry there: torch's own, or that of a wrapper with fp32 masters.
        groups: the parameters of the groups, in order.
        folder: named in messages.

    Raises:
        CheckpointError: the groups have other parameters.
    """
    if not saved or not groups:
        return None
    wrapped = "optimizer_state_dict" in saved
    inner = saved["optimizer_state_dict"] if wrapped else saved
    masters = saved.get("fp32_groups_flat")
    tensors: dict[tuple[str, str], Joined] = {}
    if masters is not None:
        _check_sizes([sum(map(_numel, group.values())) for group in groups], masters, folder)
        for number, group in enumerate(groups):
            state = tensors_of(inner["state"].get(number, {}))
            _take(tensors, [vector_of(masters[number])], [state], lambda s, group=group: cut_vector(s, group))  # type: ignore[misc]
    else:
        named = [(name, shape) for group in groups for name, shape in group.items()]
        numbers = [number for group in inner["param_groups"] for number in group["params"]]
        whole = [value for group in saved.get("fp32_groups", ()) for value in group]
        if len(named) != len(numbers):
            raise _other_groups(folder, f"{len(numbers)} parameters", f"{len(named)}")
        _check_sizes([_numel(shape) for _, shape in named], whole or [None] * len(named), folder)
        for at, ((name, shape), number) in enumerate(zip(named, numbers, strict=True)):
            state = tensors_of(inner["state"].get(number, {}))
            values = state if not whole else {WEIGHT: whole[at], **state}
            for kind, value in values.items():
                _check_sizes([_numel(shape)], [value], folder)
                tensors[name, kind] = Joined(tuple(shape), (vector_of(value),))
    updates = count_updates(inner["state"], inner["param_groups"])
    return OptimizerStates(tensors, inner["param_groups"], updates, Scale.of(saved) if wrapped else None)


def _take(
    into: dict[tuple[str, str], Joined],
    masters: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    cut: Cut,
) -> None:
    """Add what vectors hold: one of masters and one of each kind of moments from every rank."""
    for name, joined in cut(masters):
        into[name, WEIGHT] = joined
    for kind in states[0]:
        for name, joined in cut([state[kind] for state in states]):
            into[name, kind] = joined


def _elastic_steps(base: Sequence[Any]) -> list[Any]:
    return [state for entry in base for state in (entry if isinstance(entry, list) else [entry])]


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _check_sizes(sizes: Sequence[int], saved: Sequence[Tensor | None], folder: Path) -> None:
    theirs = [None if value is None else value.numel() for value in saved]
    if len(sizes) != len(theirs) or any(t not in (None, s) for s, t in zip(sizes, theirs, strict=True)):
        raise _other_groups(folder, f"sizes {theirs}", f"{list(sizes)}")


def _other_groups(folder: Path, theirs: str, ours: str) -> CheckpointError:
    return CheckpointError(
        f"`{folder}` must be of an optimizer with the same parameter groups, but has {theirs} where this "
        f"one has {ours}; build the groups as they were, or load with load_optimizer_states=False"
    )


def read_universal(folder: Path, shapes: Shapes) -> OptimizerStates:
    """Masters and moments in a checkpoint's folder ``zero``.

    Args:
        folder: the folder.
        shapes: those of parameters whose tensors may be stored flat, as of stage 3.

    Raises:
        DamagedCheckpointError: a parameter has no fp32 weights.
        CheckpointError: a file names a class that is not known.
    """
    tensors: dict[tuple[str, str], Joined] = {}
    steps: list[Mapping[str, Any]] = []
    for file in parameter_files(folder, load_states):
        name, value = file.parameter, file.value
        if file.kind == "step":
            steps.append({"step": value})
        elif isinstance(value, Tensor):
            kind = WEIGHT if file.kind == "fp32" else file.kind
            tensors[name, kind] = Joined(shapes.get(name, tuple(value.shape)), (value.reshape(-1),))
    saved = optimizer_facts(folder, load_states)
    groups = saved.get("param_groups", ())
    # Stage 3 has no step.pt, but the optimizer's own state, which counts.
    updates = count_updates(steps or saved.get("optimizer_state_dict", {}).get("state", {}), groups)
    return OptimizerStates(tensors, groups, updates, Scale.of(saved))
