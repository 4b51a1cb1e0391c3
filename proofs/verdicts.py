"""How far two trainings of a model are apart: bit for bit, within rounding, or by their loss curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.verify.compare import Tolerance, compare
from megazero.verify.record import Record

# Sums are added in another order, and exp, tanh and rsqrt differ in their last bits. Adam's epsilon keeps a
# step from making more of that than it is, as in law 1, whose layouts stay within a fifth of this.
ROUNDING = Tolerance(loss=5e-5, grad_norm=5e-4, relative=1e-3, absolute=1e-5)
FP32_CURVE = 1e-4
"""Of each loss, where weights cannot be compared."""
BF16_CURVE = 1e-2
"""Of each loss in 20 steps: 8 bits round by 0.4%, which sums level out."""
CHOSEN_CURVE = 4e-2
"""Likewise, where a last bit turns a token's expert, or a loss is of few samples."""
FP8_CURVE = 3e-2
"""As for bf16, with 3 bits."""


@dataclass(frozen=True)
class Verdict:
    """How far two sides are apart: the share of the bound that is used, above 1 if it does not hold."""

    used: float
    where: str


def near(first: Record, second: Record, tolerance: Tolerance = ROUNDING) -> Verdict:
    """The worst deviation of two trainings within rounding."""
    worst = max(compare([first], second, tolerance), key=lambda deviation: deviation.share)
    return Verdict(worst.share, f"{worst.kind} of {worst.where}")


def curve(first: Record, second: Record, bound: float) -> Verdict:
    """The worst relative difference of two loss curves; of losses below 0.1, the absolute one times ten.

    What is no loss, such as a router's entropy, does not count.
    """
    worst = Verdict(0.0, "no step")
    for step, (one, other) in enumerate(zip(first.losses, second.losses, strict=True)):
        for label, loss in other.items():
            if "loss" not in label:
                continue
            mine = one[label]
            if mine is None or loss is None:
                used = 0.0 if mine is loss else float("inf")
            else:
                used = abs(mine - loss) / max(abs(loss), 0.1) / bound
            if not used <= worst.used:
                worst = Verdict(used if used == used else float("inf"), f"{label} of step {step}")
    return worst


def bits(first: Record, second: Record) -> Verdict:
    """Whether two trainings are the same to the last bit."""
    for step, losses in enumerate(first.losses):
        if losses != second.losses[step] or first.grad_norms[step] != second.grad_norms[step]:
            return Verdict(float("inf"), f"loss or norm of step {step}")
        for kind in ("gradients", "weights"):
            verdict = same_tensors(getattr(first, kind)[step], getattr(second, kind)[step])
            if verdict.used:
                return Verdict(verdict.used, f"{kind} of {verdict.where}, step {step}")
    return Verdict(0.0, "every bit")


def same_tensors(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Verdict:
    """Whether two tables of tensors, which must not be empty, are the same to the last bit."""
    if first.keys() != second.keys() or not first:
        return Verdict(float("inf"), "names")
    bad = [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]
    return Verdict(float("inf"), bad[0]) if bad else Verdict(0.0, "every bit")
