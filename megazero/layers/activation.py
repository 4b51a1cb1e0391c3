"""Activations of MLPs: each MLP makes the one that its spec names.

To add one, write a maker and a row in the table. An activation with learned parameters is a module.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.layers.placement import Placement
from megazero.mpu.param_spec import InitialValues, ParamSpec
from megazero.ops.bias_gelu import bias_gelu
from megazero.ops.chunks import compute_dtype
from megazero.ops.gated import GatedUnit, gated
from megazero.ops.squared_relu import squared_relu
from megazero.ops.swiglu import swiglu
from megazero.spec.parts import ActivationSpec

Activation = Callable[[Tensor, Tensor | None], Tensor]
"""[..., f], or [..., 2 f] with gates -> [..., f]. The second argument is a bias [f] that the first one holds
already, whose gradient is made too; None for none, and always where `SUMS_BIAS` does not name it."""

Maker = Callable[[ActivationSpec, str, Placement], Activation]
"""Makes an activation, given the global name that its parameters begin with."""

SUMS_BIAS = frozenset({"gelu", "gelu_exact"})
"""The activations that make a bias's gradient."""


def activation_of(spec: ActivationSpec, name: str, placement: Placement) -> Activation:
    """The activation that a spec names.

    Args:
        spec: which one.
        name: prefix of the global names of its parameters.
        placement: ranks, dtype and device.
    """
    return _MAKERS[spec.name](spec, name, placement)


def _relu(inner: Tensor, included: Tensor | None = None) -> Tensor:
    return torch.threshold(inner, 0.0, 0.0)  # saves what it is given, and not its result, as relu does


def _squared_relu(inner: Tensor, included: Tensor | None = None) -> Tensor:
    return squared_relu(inner)


def _gelu(spec: ActivationSpec, name: str, placement: Placement) -> Activation:
    exact = spec.name == "gelu_exact"

    def activation(inner: Tensor, included: Tensor | None = None) -> Tensor:
        return bias_gelu(inner, None, exact, included)

    return activation


def _gated(kind: Literal["swiglu", "geglu", "quick_geglu"]) -> Maker:
    def maker(spec: ActivationSpec, name: str, placement: Placement) -> Activation:
        unit = GatedUnit(kind, spec.offset, spec.clamp)
        plain = unit == GatedUnit("swiglu")

        def activation(inner: Tensor, included: Tensor | None = None) -> Tensor:
            halves = inner.unflatten(-1, (2, inner.shape[-1] // 2))
            return swiglu(halves) if plain else gated(halves, unit)

        return activation

    return maker


class XIELU(nn.Module):
    """xIELU (Huang & Schlag 2024, arXiv:2411.13010), whose two slopes are learned; Apertus has it.

    p x^2 + x / 2 where x > 0, else n (exp(x) - 1 - x) + x / 2. With learned a and b, p = softplus(a) and n =
    softplus(b) + 1/2; both start at 0.8.
    """

    def __init__(self, name: str, placement: Placement):
        super().__init__()

        def slope(which: str, at: float) -> nn.Parameter:
            start = InitialValues("constant", value=math.log(math.expm1(at)))
            partial = placement.tp.size > 1  # each rank has some of the inner channels
            return placement.parameter(
                ParamSpec(f"{name}.{which}", (1,), start, weight_decay=False, partial_grad=partial)
            )

        self.alpha_p, self.alpha_n = slope("alpha_p", 0.8), slope("alpha_n", 0.8 - _LINEAR)

    def forward(self, inner: Tensor, included: Tensor | None = None) -> Tensor:
        x = inner.to(compute_dtype(inner.dtype))
        positive, negative = (F.softplus(slope.to(x.dtype)) for slope in (self.alpha_p, self.alpha_n))
        # As in the authors' code, exp sees numbers below 0 alone, of which none overflows.
        below = (torch.expm1(x.clamp(max=_BELOW)) - x) * (negative + _LINEAR)
        moved: Tensor = torch.where(x > 0, positive * x * x, below) + _LINEAR * x
        return moved.to(inner.dtype)


_LINEAR, _BELOW = 0.5, -1e-6


_MAKERS: MappingProxyType[str, Maker] = MappingProxyType(
    {
        "gelu": _gelu,
        "gelu_exact": _gelu,
        "swiglu": _gated("swiglu"),
        "geglu": _gated("geglu"),
        "quick_geglu": _gated("quick_geglu"),
        "relu": lambda *_: _relu,
        "squared_relu": lambda *_: _squared_relu,
        "xielu": lambda _, name, placement: XIELU(name, placement),
    }
)
"""The activations by name."""
