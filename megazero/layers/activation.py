"""Activations of MLPs: what a spec names, made once for each MLP.

To add one, write a maker and give it a row; one with learned parameters is a module that makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch
from torch import Tensor

from megazero.layers.placement import Placement
from megazero.ops.bias_gelu import bias_gelu
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
        name: global name that its parameters begin with, if it has any.
        placement: ranks, dtype and device.
    """
    return _MAKERS[spec.name](spec, name, placement)


def _relu(inner: Tensor, included: Tensor | None = None) -> Tensor:
    return torch.threshold(inner, 0.0, 0.0)  # saves what it is given, and not its result, as relu does


def _squared_relu(inner: Tensor, included: Tensor | None = None) -> Tensor:
    return squared_relu(inner)


def _gelu(spec: ActivationSpec, name: str, placement: Placement) -> Activation:
    exact = spec.name == "gelu_exact"
    return lambda inner, included=None: bias_gelu(inner, None, exact, included)


def _gated(spec: ActivationSpec, name: str, placement: Placement) -> Activation:
    unit = GatedUnit(spec.name, spec.offset, spec.clamp)
    if unit == GatedUnit("swiglu"):
        return lambda inner, included=None: swiglu(_halves(inner))
    return lambda inner, included=None: gated(_halves(inner), unit)


def _halves(inner: Tensor) -> Tensor:
    """[..., 2 f] -> [..., 2, f]."""
    return inner.unflatten(-1, (2, inner.shape[-1] // 2))


_MAKERS: MappingProxyType[str, Maker] = MappingProxyType(
    {
        "gelu": _gelu,
        "gelu_exact": _gelu,
        "swiglu": _gated,
        "geglu": _gated,
        "quick_geglu": _gated,
        "relu": lambda *_: _relu,
        "squared_relu": lambda *_: _squared_relu,
    }
)
"""The activations by name."""
