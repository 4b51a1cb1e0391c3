"""Masters and moments in the files that DeepSpeed's ZeRO (stages 1 and 2) and its bf16 optimizer write.

Each data-parallel rank's file has its part of one flat vector of each group of parameters; the model's file
names them, in order::

    global_step100/[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt     D: data-parallel rank
    global_step100/mp_rank_MM_model_states.pt                          MM: stage x tensor ranks + tensor rank
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.megatron.dialects import core_name
from megazero.checkpoint.megatron.pickles import Kept, load_pickle
from megazero.checkpoint.megatron.rank_optimizer import MOMENTS
from megazero.checkpoint.part import WEIGHT
from megazero.errors import CheckpointError

_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<data>\d+)_mp_rank_(?P<model>\d+)_?optim_states\.pt")
_WANTED = frozenset({"base_optimizer_state", "single_partition_of_fp32_groups"})
_SCALER = "deepspeed.runtime.fp16.loss_scaler."
_KNOWN = (
    *((Kept, _SCALER + name) for name in ("LossScalerBase", "LossScaler", "DynamicLossScaler")),
    (Kept, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (Kept, "deepspeed.utils.tensor_fragment.fragment_address"),
)


Pieces = tuple[tuple[Tensor, ...], tuple[int, ...]]
"""Flat tensors that make one when they are joined, and its shape."""


class Joined(Mapping[str, Tensor]):
    """Tensors by name, each joined when it is asked for."""

    def __init__(self, pieces: Mapping[str, Pieces]):
        self.pieces = pieces

    def __getitem__(self, name: str) -> Tensor:
        pieces, shape = self.pieces[name]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.pieces)

    def __len__(self) -> int:
        return len(self.pieces)


@dataclass(frozen=True)
class ZeroStates:
    """The state of a model-parallel rank: kind -> name -> tensor; and its counts and loss scale."""

    tensors: Mapping[str, Joined]
    numbers: Mapping[str, Any]


def read_zero(folder: Path, rank: int, shapes: Any, inert: Sequence[str] = ()) -> ZeroStates:
    """The state of a model-parallel rank's optimizer.

    Args:
        folder: the checkpoint's.
        rank: the model-parallel rank.
        shapes: `param_shapes` of its file of the model.
        inert: classes whose objects are not needed, by full name.

    Raises:
        CheckpointError: there is none, a data-parallel rank's is missing, or it is of another kind.
    """
    files = {
        int(m["data"]): p
        for p in folder.iterdir()
        if (m := _FILE.fullmatch(p.name)) and int(m["model"]) == rank
    }
    if not files or not isinstance(shapes, (list, tuple)):
        raise CheckpointError(
            f"`{folder}` must hold zero_pp_rank_*_mp_rank_{rank:02d}_optim_states.pt, and the names of its "
            f"parameters, to go on from, but does not; copy all files, or import without --with-optimizer"
        )
    paths = [files[number] for number in sorted(files)]
    saved = [_load(path, inert) for path in paths]
    _check_ranks(folder, sorted(files), saved, len(shapes))
    tensors: dict[str, dict[str, Pieces]] = {kind: {} for kind in (WEIGHT, *MOMENTS)}
    for number, group in enumerate(shapes):
        named = {str(name): tuple(map(int, shape)) for name, shape in group.items()}
        gaps = (saved[0].get("param_alignment_paddings") or {number: ()})[number]
        vectors = {WEIGHT: [one["single_partition_of_fp32_groups"][number] for one in saved]}
        states = [_group_state(one["base_optimizer_state"], number) for one in saved]
        vectors |= {kind: [state.get(kind) for state in states] for kind in MOMENTS}
        for kind, parts in vectors.items():
            if not all(isinstance(part, Tensor) for part in parts):
                raise CheckpointError(
                    f"`{paths[0]}` must hold Adam's two moments and the masters of each group, but lacks "
                    f"{kind} of group {number}; import without --with-optimizer"
                )
            tensors[kind] |= dict(_cut(paths[0], [part.reshape(-1) for part in parts], named, gaps))
    return ZeroStates({kind: Joined(of) for kind, of in tensors.items()}, _numbers(saved[0]))


def check_masters(
    path: Path, states: Mapping[str, Mapping[str, Tensor]], weights: Mapping[str, Tensor]
) -> None:
    """Check that masters, rounded, are the weights that are called alike by Core.

    Raises:
        CheckpointError: one is not, so that the vectors are cut otherwise than their names say.
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


def _load(path: Path, inert: Sequence[str]) -> Mapping[str, Any]:
    loaded = load_pickle(path, inert, _KNOWN)
    saved = loaded.get("optimizer_state_dict") if isinstance(loaded, Mapping) else None
    if (
        not isinstance(saved, Mapping)
        or not {"base_optimizer_state", "single_partition_of_fp32_groups"} <= saved.keys()
    ):
        raise CheckpointError(
            f"`{path}` must hold the state of ZeRO's stages 1 or 2, or of the bf16 optimizer, but does not; "
            f"import without --with-optimizer"
        )
    return saved


def _check_ranks(folder: Path, ranks: Sequence[int], saved: Sequence[Mapping[str, Any]], groups: int) -> None:
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


def _group_state(base: Any, number: int) -> Mapping[str, Any]:
    """The moments of a group: torch's own state, or (elastic checkpoints) a list of them."""
    state = base["state"].get(number) if isinstance(base, Mapping) else base[number]
    return state if isinstance(state, Mapping) else {}


def _cut(
    path: Path, slices: Sequence[Tensor], shapes: Mapping[str, tuple[int, ...]], gaps: Sequence[int]
) -> Iterator[tuple[str, Pieces]]:
    starts = [0]
    for part in slices:
        starts.append(starts[-1] + part.numel())
    at = 0
    for number, (name, shape) in enumerate(shapes.items()):
        end = at + torch.Size(shape).numel()
        if end > starts[-1]:
            raise CheckpointError(
                f"`{path}` and its other ranks must hold {end} elements up to {name}, but hold {starts[-1]}; "
                f"copy all files of one checkpoint"
            )
        pieces = [
            part[max(at - start, 0) : max(end - start, 0)]
            for part, start in zip(slices, starts, strict=False)
        ]
        yield name, (tuple(piece for piece in pieces if piece.numel()), shape)
        at = end + (gaps[number] if gaps else 0)


def _numbers(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """The counts of updates, and the loss scale, by the names that Megatron-LM has for it."""
    base = saved["base_optimizer_state"]
    numbers: dict[str, Any] = {"optimizer": {"base": base, "step": saved.get("base_optimizer_state_step")}}
    scaler = saved.get("loss_scaler")
    if isinstance(scaler, Kept) and "cur_scale" in vars(scaler):
        known = vars(scaler)
        numbers["scale"] = float(known["cur_scale"])
        if "last_overflow_iter" in known:
            good, window = known["cur_iter"] - 1 - known["last_overflow_iter"], known["scale_window"]
            # It counts on where Megatron-LM begins anew.
            numbers["growth_tracker"] = good if good <= window else (good - 1) % window
            numbers["hysteresis_tracker"] = known["cur_hysteresis"]
    return numbers
