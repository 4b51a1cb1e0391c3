"""The public squared ReLU and its table of implementations."""

from __future__ import annotations

from torch import Tensor

from megazero.ops.dispatch import Implementation, Operator, choose
from megazero.ops.squared_relu.fused import squared_relu_fused
from megazero.ops.squared_relu.reference import squared_relu_reference

SQUARED_RELU = Operator(
    "squared_relu",
    (
        Implementation("fused", squared_relu_fused),
        Implementation("reference", squared_relu_reference),
    ),
)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2, elementwise."""
    return choose(SQUARED_RELU.implementations, x).fn(x)
