"""The public bias + GELU and its table of implementations."""

from __future__ import annotations

from torch import Tensor

from megazero.ops.bias_gelu.composed import bias_gelu_torch
from megazero.ops.bias_gelu.native_cpu import bias_gelu_native_cpu
from megazero.ops.bias_gelu.reference import bias_gelu_reference
from megazero.ops.dispatch import Implementation, Operator, choose
from megazero.ops.native import CPU, NATIVE_DTYPES, available

BIAS_GELU = Operator(
    "bias_gelu",
    (
        Implementation("native_cpu", bias_gelu_native_cpu, available, CPU, NATIVE_DTYPES),
        Implementation("torch", bias_gelu_torch),
        Implementation("reference", bias_gelu_reference),
    ),
)


def bias_gelu(x: Tensor, bias: Tensor | None, exact: bool = False) -> Tensor:
    """gelu(x + bias) for x [..., f] and bias [f] or None; the tanh form unless `exact`."""
    return choose(BIAS_GELU.implementations, x).fn(x, bias, exact)
