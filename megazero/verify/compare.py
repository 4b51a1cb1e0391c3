"""How far two trainings are apart, in units of what rounding explains."""

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
    """The worst of one kind: `share` of the tolerance that it takes, so that above 1 is too far.

    Attributes:
        kind: loss, norm (of the gradients), gradients, weights or tied copies.
        share: of the tolerance; inf for a value that is not finite, or is missing.
        where: step and name.
    """

    kind: str
    share: float
    where: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.where}: {self.share:.3g} of the tolerance"


def compare(
    records: Sequence[Record], expected: Record, tolerance: Tolerance | None = None
) -> list[Deviation]:
    """The worst deviation of each kind over all ranks of a layout from the one process's record.

    Every parameter must be on some rank, and copies of a tied parameter must equal it bit for bit.
    """
    tolerance = tolerance or Tolerance()
    return [
        _worst_number("loss", [r.losses for r in records], expected.losses, tolerance.loss),
        _worst_number(
            "gradient norm", [r.grad_norms for r in records], expected.grad_norms, tolerance.grad_norm
        ),
        _worst_tensor("gradients", [r.gradients for r in records], expected.gradients, tolerance),
        _worst_tensor("weights", [r.weights for r in records], expected.weights, tolerance),
        _tied(records),
    ]


def _worst_number(kind: str, got: list[list[float]], want: list[float], relative: float) -> Deviation:
    worst = Deviation(kind, 0.0, "step 0")
    for values in got:
        if len(values) != len(want):
            return Deviation(kind, float("inf"), f"step {min(len(values), len(want))} (missing)")
        for step, (a, b) in enumerate(zip(values, want, strict=True)):
            share = abs(a - b) / (relative * abs(b)) if b else (0.0 if a == b else float("inf"))
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
    if got.shape != want.shape or not got.isfinite().all():
        return float("inf")
    allowed = tolerance.absolute + tolerance.relative * want.abs()
    return float(((got - want).abs() / allowed).max()) if want.numel() else 0.0


def _tied(records: Sequence[Record]) -> Deviation:
    """Copies of a tied parameter, against the parameter: equal in every bit, in gradient and weight."""
    for field in ("gradients", "weights"):
        for step in range(len(records[0].weights)):
            whole = {k: v for r in records for k, v in getattr(r, field)[step].items()}
            for key, value in whole.items():
                original = whole[key.removeprefix("copy of ")]
                if not torch.equal(value, original):
                    return Deviation("tied copies", float("inf"), f"{key} ({field}), step {step}")
    return Deviation("tied copies", 0.0, "all steps")
