"""Flat vectors of DeepSpeed's ZeRO, cut into parameters; states of parameter groups; loss scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megazero.errors import DamagedCheckpointError
from megazero.formats.pickles import Saved

Shapes = Mapping[str, tuple[int, ...]]
"""Parameter -> its shape, in the order of a flat vector."""


@dataclass(frozen=True)
class Joined:
    """A tensor in pieces, joined by `whole`.

    Attributes:
        shape: its shape.
        pieces: flat tensors; concatenated, they are the tensor's elements, and perhaps padding.
    """

    shape: tuple[int, ...]
    pieces: tuple[Tensor, ...]

    def whole(self) -> Tensor:
        """Join the pieces."""
        count = torch.Size(self.shape).numel()
        flat = self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces)
        return flat.detach().reshape(-1)[:count].view(self.shape)


def cut_vector(
    slices: Sequence[Tensor], shapes: Shapes, gaps: Sequence[int] = ()
) -> Iterator[tuple[str, Joined]]:
    """Cut a flat vector, of which each rank has one slice, into parameters (stages 1 and 2).

    Args:
        slices: each rank's slice, in order.
        shapes: the parameters in the vector, which may end in padding.
        gaps: the elements of padding behind each parameter; () for none.

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
    """Cut the ranks' vectors, which have an equal slice of each parameter, into parameters (stage 3).

    Args:
        slices: each rank's vector.
        shapes: the parameters in a vector; the last rank's slice of each may end in padding.

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
    """The moments of a parameter group, one vector of each kind; those of elastic checkpoints are joined."""
    if isinstance(base, Mapping):
        return tensors_of(base["state"].get(number, {}))
    entry = base[number]
    return tensors_of(entry) if isinstance(entry, Mapping) else joined_states(dict(enumerate(entry)))


def joined_states(states: Mapping[int, Saved]) -> Mapping[str, Tensor]:
    """Concatenate the vectors of numbered states, by kind."""
    parts = [tensors_of(states[number]) for number in sorted(states)]
    return {kind: torch.cat([part[kind] for part in parts]) for kind in (parts[0] if parts else ())}


def tensors_of(state: Saved) -> dict[str, Tensor]:
    """The moments of a state; a counter may be a tensor too, but has no dims."""
    return {
        kind: vector_of(value) for kind, value in state.items() if isinstance(value, Tensor) and value.dim()
    }


def vector_of(value: Tensor) -> Tensor:
    """Flatten a tensor."""
    return value.detach().reshape(-1)


@dataclass(frozen=True)
class Scale:
    """A dynamic loss scale.

    Attributes:
        scale: the factor of the loss.
        good_steps: steps since the last overflow.
        hysteresis: overflows that are still tolerated; None if it was not saved.
    """

    scale: float
    good_steps: int
    hysteresis: int | None

    @classmethod
    def of(cls, saved: Saved) -> Scale | None:
        """Read a dynamic loss scale from an optimizer's state or the loss scaler in it; None without one."""
        scaler = vars(saved["loss_scaler"]) if "loss_scaler" in saved else saved
        if not isinstance(scaler, Mapping) or "last_overflow_iter" not in scaler:
            return None
        good = int(scaler["cur_iter"]) - 1 - int(scaler["last_overflow_iter"])
        return cls(float(scaler["cur_scale"]), good, scaler.get("cur_hysteresis"))

    def since_growth(self, window: int) -> int:
        """Good steps since the scale last grew, as Megatron-LM counts; DeepSpeed counts from the overflow."""
        return self.good_steps if self.good_steps <= window else (self.good_steps - 1) % window


def _too_short(name: str, wanted: int, size: int) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"the vector that holds `{name}` must have at least {wanted} elements, but has {size}; the files are "
        "not all of one checkpoint: copy them again"
    )
