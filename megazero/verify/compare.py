"""Compare two trainings; differences are given as multiples of what rounding can explain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.verify.record import Record


@dataclass(frozen=True)
class Tolerance:
    """``|got - want| <= absolute + relative * |want|``. The defaults are for fp32 over five steps of Adam."""

    loss: float = 1e-5
    grad_norm: float = 1e-4
    relative: float = 2e-4
    absolute: float = 2e-6


@dataclass(frozen=True)
class Deviation:
    """The worst deviation of one kind.

    Attributes:
        kind: the label of a loss, or gradient norm, gradients, weights or tied copies.
        share: the deviation as a multiple of the tolerance, too large above 1; inf if a value is missing or
            not finite.
        where: the step, and for tensors the parameter's name.
    """

    kind: str
    share: float
    where: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.where}: {self.share:.3g} of the tolerance"


def compare(
    records: Sequence[Record], expected: Record, tolerance: Tolerance | None = None
) -> list[Deviation]:
    """Return the worst deviation of each kind from the single process's record, over all ranks of a layout.

    Every parameter must be on some rank, and all copies of a tied parameter must be equal bit for bit.
    """
    tolerance = tolerance or Tolerance()
    return [
        _worst_loss(records, expected, tolerance.loss),
        _worst_number(
            "gradient norm", [r.grad_norms for r in records], expected.grad_norms, tolerance.grad_norm
        ),
        _worst_tensor("gradients", [r.gradients for r in records], expected.gradients, tolerance),
        _worst_tensor("weights", [r.weights for r in records], expected.weights, tolerance),
        _tied(records),
    ]


def _worst_loss(records: Sequence[Record], expected: Record, relative: float) -> Deviation:
    worst = Deviation("loss", 0.0, "step 0")
    everything = [losses for record in (expected, *records) for losses in record.losses]
    for label in dict.fromkeys(label for losses in everything for label in losses):
        got = [[losses.get(label) for losses in record.losses] for record in records]
        want = [losses.get(label) for losses in expected.losses]
        deviation = _worst_number(label, got, want, relative)
        if not deviation.share <= worst.share:
            worst = deviation
    return worst


def _worst_number(
    kind: str, got: Sequence[Sequence[float | None]], want: Sequence[float | None], relative: float
) -> Deviation:
    worst = Deviation(kind, 0.0, "step 0")
    for values in got:
        if len(values) != len(want):
            return Deviation(kind, float("inf"), f"step {min(len(values), len(want))} (missing)")
        for step, (a, b) in enumerate(zip(values, want, strict=True)):
            if a is None or not b:
                share = 0.0 if a == b else float("inf")
            else:
                share = abs(a - b) / (relative * abs(b))
            if not share <= worst.share:
                worst = Deviation(kind, share if share == share else float("inf"), f"step {step}")
    return worst


def _worst_tensor(
    kind: str, got: list[list[dict[str, Tensor]]], want: list[dict[str, Tensor]], tolerance: Tolerance
) -> Deviation:
    worst = Deviation(kind, 0.0, "nothing")
    for step, expected in enumerate(want):
        seen: set[str] = set()
        for rank_values in got:
            for key, value in rank_values[step].items():
                name = key.removeprefix("copy of ")
                seen.add(name)
                share = _share(value, expected[name], tolerance)
                if not share <= worst.share:
                    worst = Deviation(kind, share, f"{key}, step {step}")
        if missing := expected.keys() - seen:
            return Deviation(kind, float("inf"), f"{sorted(missing)[0]}, step {step} (on no rank)")
    return worst


def _share(got: Tensor, want: Tensor, tolerance: Tolerance) -> float:
    if got.shape != want.shape or not (got.isfinite().all() and want.isfinite().all()):
        return float("inf")
    allowed = tolerance.absolute + tolerance.relative * want.abs()
    return float(((got - want).abs() / allowed).max()) if want.numel() else 0.0


def _tied(records: Sequence[Record]) -> Deviation:
    """Compare the copies of tied parameters with the originals, which they must equal bit for bit."""
    for field in ("gradients", "weights"):
        for step in range(len(records[0].weights)):
            tensors = [item for record in records for item in getattr(record, field)[step].items()]
            whole = dict(tensors)
            for key, value in tensors:
                original = key.removeprefix("copy of ")
                if key != original and not torch.equal(value, whole[original]):
                    return Deviation("tied copies", float("inf"), f"{key} ({field}), step {step}")
    return Deviation("tied copies", 0.0, "all steps")
