"""Gated linear units: half of the inner values, made nonlinear, gate the other half (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.ops.autograd import Activation, ActivationKernel, apply
from megazero.ops.chunks import compute_dtype
from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.ops.example import Example


@dataclass(frozen=True)
class GatedUnit:
    """A gated linear unit.

    Attributes:
        kind: the nonlinearity of the gate x: x sigmoid(x), the tanh form of GELU, or x sigmoid(1.702 x).
        offset: added to the values that are gated.
        clamp: the bound of the gates from above and of the values from both sides (gpt-oss, OpenAI 2025).
    """

    kind: Literal["swiglu", "geglu", "quick_geglu"]
    offset: float = 0.0
    clamp: float | None = None


def _formula(gate_up: Tensor, unit: GatedUnit) -> Tensor:
    gate, up = gate_up.to(compute_dtype(gate_up.dtype)).unbind(-2)
    if unit.clamp is not None:
        gate, up = gate.clamp(max=unit.clamp), up.clamp(-unit.clamp, unit.clamp)
    if unit.kind == "geglu":
        gate = F.gelu(gate, approximate="tanh")
    else:
        gate = gate * torch.sigmoid(gate if unit.kind == "swiglu" else 1.702 * gate)
    return (gate * (up + unit.offset)).to(gate_up.dtype)


def gated_reference(gate_up: Tensor, unit: GatedUnit) -> Tensor:
    """nonlinearity(gate) * (up + offset) for gate_up [..., 2, f], in fp32 for narrower types."""
    return _formula(gate_up, unit)


def gated_saving(gate_up: Tensor, unit: GatedUnit) -> Tensor:
    """The same, of which backward keeps gate_up alone and computes the rest again."""

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return _formula(x, unit), x

    def backward(x: Tensor, grad: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(_formula(x, unit), x, grad)[0]

    return apply(Activation, gate_up, ActivationKernel(forward, backward))


def _examples() -> Iterator[Example]:
    units = (
        GatedUnit("geglu"),
        GatedUnit("quick_geglu", 1.0, 7.0),
        GatedUnit("swiglu", 0.5),
        GatedUnit("swiglu", 0.0, 2.0),
    )
    for shape in ((3, 2, 5), (1, 2, 1), (257, 2, 2, 33), (0, 2, 4)):
        for unit in units:
            yield Example(f"{shape} {unit}", (shape,), lambda f, x, unit=unit: f(x, unit), 3.0)


GATED: Operator[Callable[[Tensor, GatedUnit], Tensor]] = Operator(
    "gated",
    (Implementation("saving", gated_saving), Implementation("reference", gated_reference)),
    examples=_examples,
)


def gated(gate_up: Tensor, unit: GatedUnit) -> Tensor:
    """The unit's result [..., f] for gate_up [..., 2, f], gate first."""
    return GATED.choose(CallFacts.of(gate_up)).fn(gate_up, unit)
