"""Masters and moments in the files of DeepSpeed's ZeRO (stages 1 and 2) and of its bf16 optimizer.

Each data-parallel rank's file has its slice of one flat vector for each parameter group; the model file names
the parameters in order::

    global_step100/[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt     D: data-parallel rank
    global_step100/mp_rank_MM_model_states.pt                          MM: stage x tensor ranks + tensor rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megazero.checkpoint.part import WEIGHT
from megazero.errors import CheckpointError
from megazero.formats.deepspeed.files import find_files
from megazero.formats.deepspeed.states import join_ranks
from megazero.formats.deepspeed.vectors import Scale
from megazero.formats.megatron.dialects import core_name
from megazero.formats.megatron.rank_optimizer import MOMENTS
from megazero.formats.megatron.weights import Lazy
from megazero.formats.pickles import KEPT, KeptState, Saved, load_pickle, parsed

_HELD = frozenset({"base_optimizer_state", "single_partition_of_fp32_groups"})


@dataclass(frozen=True)
class ZeroStates:
    """The state of a model-parallel rank: kind -> name -> tensor, and its counts and loss scale by name."""

    tensors: Mapping[str, Lazy]
    numbers: Saved


def read_zero(folder: Path, rank: int, shapes: object, inert: Sequence[str] = ()) -> ZeroStates:
    """Read the state of a model-parallel rank's optimizer.

    Args:
        folder: the checkpoint's folder.
        rank: the model-parallel rank.
        shapes: `param_shapes` of its model file.
        inert: classes whose objects are not needed, by full name.

    Raises:
        CheckpointError: there is no state, a data-parallel rank's file is missing, or the optimizer is of
            another kind.
    """
    every = find_files(folder)
    files = {data: path for (of, data), path in (every.optimizer if every else {}).items() if of == rank}
    if not files or not isinstance(shapes, (list, tuple)):
        raise CheckpointError(
            f"`{folder}` must hold zero_pp_rank_*_mp_rank_{rank:02d}_optim_states.pt, and the names of its "
            f"parameters, to go on from, but does not; copy all files, or import without --with-optimizer"
        )
    saved = [_load(files[number], inert) for number in sorted(files)]
    with parsed(folder, f"an optimizer's state of rank {rank} as DeepSpeed saves it"):
        _check_ranks(folder, sorted(files), saved, len(shapes))
        groups = [{str(name): tuple(map(int, shape)) for name, shape in group.items()} for group in shapes]
        joined = join_ranks(saved, groups)
        names = [name for group in groups for name in group]
        if lacking := [(kind, name) for kind in MOMENTS for name in names if (name, kind) not in joined]:
            kind, name = lacking[0]
            raise CheckpointError(
                f"`{folder}` must hold Adam's two moments of each parameter, but lacks {kind} of {name}; "
                f"import without --with-optimizer"
            )
        tensors = {kind: Lazy({n: joined[n, kind].whole for n in names}) for kind in (WEIGHT, *MOMENTS)}
        return ZeroStates(tensors, counts_of(saved[0]))


def check_masters(
    path: Path, states: Mapping[str, Mapping[str, Tensor]], weights: Mapping[str, Tensor]
) -> None:
    """Check that masters, rounded, equal the weights with the same names of Core's.

    Raises:
        CheckpointError: one differs, so the vectors were not cut as `param_shapes` says.
    """
    named = {core_name(name): tensor for name, tensor in weights.items()}
    for name, master in states.get(WEIGHT, {}).items():
        weight = named.get(core_name(name))
        if weight is not None and not (
            master.shape == weight.shape and torch.equal(master.to(weight.dtype), weight)
        ):
            raise CheckpointError(
                f"`{path}` must hold weights that masters are more exactly, but {name} differs; copy "
                f"all files of one checkpoint, or import without --with-optimizer"
            )


def _load(path: Path, inert: Sequence[str]) -> Saved:
    loaded = load_pickle(path, inert, KEPT)
    saved = loaded.get("optimizer_state_dict") if isinstance(loaded, Mapping) else None
    if not isinstance(saved, Mapping) or not saved.keys() >= _HELD:
        raise CheckpointError(
            f"`{path}` must hold the state of ZeRO's stages 1 or 2, or of the bf16 optimizer, but does not; "
            f"import without --with-optimizer"
        )
    return saved


def _check_ranks(folder: Path, ranks: Sequence[int], saved: Sequence[Saved], groups: int) -> None:
    counts = saved[0].get("partition_count")
    counts = set(counts) if isinstance(counts, (list, tuple)) else {counts}
    if counts != {len(ranks)} or list(ranks) != list(range(len(ranks))):
        raise CheckpointError(
            f"`{folder}` must hold the optimizer's files of {sorted(map(str, counts))} data-parallel ranks, "
            f"but has those of {list(ranks)}; copy all files, or import without --with-optimizer"
        )
    if any(len(one["single_partition_of_fp32_groups"]) != groups for one in saved):
        raise CheckpointError(
            f"`{folder}` must hold masters of {groups} groups of parameters, but holds others; copy all files"
        )


def counts_of(saved: Saved) -> Saved:
    """The counts of updates, and the loss scale by Megatron-LM's names."""
    base = saved["base_optimizer_state"]
    numbers: dict[str, object] = {"optimizer": {"base": base, "step": saved.get("base_optimizer_state_step")}}
    scaler = saved.get("loss_scaler")
    if isinstance(scaler, KeptState) and "cur_scale" in vars(scaler):
        known = vars(scaler)
        numbers["scale"] = float(known["cur_scale"])
        if scale := Scale.of(saved):
            numbers["growth_tracker"] = scale.since_growth(known["scale_window"])
            numbers["hysteresis_tracker"] = known["cur_hysteresis"]
    return numbers
