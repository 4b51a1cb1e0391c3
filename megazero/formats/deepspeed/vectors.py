"""Flat vectors in the files of DeepSpeed's ZeRO, cut into parameters; states of groups; loss scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megazero.errors import DamagedCheckpointError

Shapes = Mapping[str, tuple[int, ...]]
"""Parameter -> its shape, in the order in which they lie in a flat vector."""


@dataclass(frozen=True)
class Joined:
    """A tensor in pieces, which are joined when it is asked for.

    Attributes:
        shape: its shape.
        pieces: flat tensors that it begins with when they are concatenated.
    """

    shape: tuple[int, ...]
    pieces: tuple[Tensor, ...]

    def whole(self) -> Tensor:
        """The tensor."""
        count = torch.Size(self.shape).numel()
        flat = self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces)
        return flat.detach().reshape(-1)[:count].view(self.shape)


def cut_vector(
    slices: Sequence[Tensor], shapes: Shapes, gaps: Sequence[int] = ()
) -> Iterator[tuple[str, Joined]]:
    """The parameters of one flat vector that is cut into slices, one for each rank (stages 1 and 2).

    Args:
        slices: each rank's slice, in order; the last ones may lack their padding.
        shapes: the parameters in the vector, which may end in padding.
        gaps: how many elements of padding follow each parameter.

    Raises:
        DamagedCheckpointError: the vector is too short.
    """
    starts = [0]
    for piece in slices:
        starts.append(starts[-1] + piece.numel())
    at = 0
    for number, (name, shape) in enumerate(shapes.items()):
        end = at + torch.Size(shape).numel()
        if end > starts[-1]:
            raise _too_short(name, end, starts[-1])
        pieces = tuple(
            piece.reshape(-1)[max(at - start, 0) : end - start]
            for piece, start in zip(slices, starts, strict=False)
            if start < end and at < start + piece.numel()
        )
        yield name, Joined(tuple(shape), pieces or (slices[0].reshape(-1)[:0],))
        at = end + (gaps[number] if gaps else 0)


def cut_parameters(slices: Sequence[Tensor], shapes: Shapes) -> Iterator[tuple[str, Joined]]:
    """The parameters of which each rank has an equal slice, one after another in its vector (stage 3).

    Args:
        slices: each rank's vector.
        shapes: the parameters in it; the last rank's slice of each may end in padding.

    Raises:
        DamagedCheckpointError: a vector is too short.
    """
    at = 0
    for name, shape in shapes.items():
        size = -(-torch.Size(shape).numel() // len(slices))
        for piece in slices:
            if at + size > piece.numel():
                raise _too_short(name, at + size, piece.numel())
        yield name, Joined(tuple(shape), tuple(piece.reshape(-1)[at : at + size] for piece in slices))
        at += size


def group_state(base: Any, number: int) -> Mapping[str, Tensor]:
    """The moments of a group: one vector of each kind, or (elastic checkpoints) one for each parameter."""
    if isinstance(base, Mapping):
        return tensors_of(base["state"].get(number, {}))
    entry = base[number]
    return tensors_of(entry) if isinstance(entry, Mapping) else joined_states(dict(enumerate(entry)))


def joined_states(states: Mapping[Any, Mapping[str, Any]]) -> Mapping[str, Tensor]:
    """The vectors of sub-groups, one after another, by kind."""
    parts = [tensors_of(states[number]) for number in sorted(states)]
    return {kind: torch.cat([part[kind] for part in parts]) for kind in (parts[0] if parts else ())}


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The moments alone: counters may be tensors too, without dimensions."""
    return {
        kind: vector_of(value) for kind, value in state.items() if isinstance(value, Tensor) and value.dim()
    }


def vector_of(value: Tensor) -> Tensor:
    """The elements of a tensor in one dimension."""
    return value.detach().reshape(-1)


@dataclass(frozen=True)
class Scale:
    """A dynamic loss scale.

    Attributes:
        scale: the factor of the loss.
        good_steps: steps in a row without an overflow.
        hysteresis: overflows that are still tolerated; None if it was not saved.
    """

    scale: float
    good_steps: int
    hysteresis: int | None

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Scale | None:
        """Read it from a wrapper's state, or from its loss scaler's; None if there is none."""
        scaler = vars(saved["loss_scaler"]) if "loss_scaler" in saved else saved
        if not isinstance(scaler, Mapping) or "last_overflow_iter" not in scaler:
            return None
        good = int(scaler["cur_iter"]) - 1 - int(scaler["last_overflow_iter"])
        return cls(float(scaler["cur_scale"]), good, scaler.get("cur_hysteresis"))

    def since_growth(self, window: int) -> int:
        """Return the good steps since the scale grew last: Megatron-LM counts these, DeepSpeed all."""
        return self.good_steps if self.good_steps <= window else (self.good_steps - 1) % window


def _too_short(name: str, wanted: int, held: int) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"the vector that holds `{name}` must have at least {wanted} elements, but has {held}; the files are "
        "not all of one checkpoint: copy them again"
    )
