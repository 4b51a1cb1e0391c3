"""The public SwiGLU and its table of implementations."""

from __future__ import annotations

from torch import Tensor

from megazero.ops.dispatch import Implementation, Operator, choose
from megazero.ops.native import CPU, NATIVE_DTYPES, available
from megazero.ops.swiglu.chunked import swiglu_chunked
from megazero.ops.swiglu.native_cpu import swiglu_native_cpu
from megazero.ops.swiglu.reference import swiglu_reference

SWIGLU = Operator(
    "swiglu",
    (
        Implementation("native_cpu", swiglu_native_cpu, available, CPU, NATIVE_DTYPES),
        Implementation("chunked", swiglu_chunked),
        Implementation("reference", swiglu_reference),
    ),
)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2, f], gate first; returns [..., f]."""
    return choose(SWIGLU.implementations, gate_up).fn(gate_up)
