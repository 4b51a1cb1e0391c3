"""The public bias + GELU and its table of implementations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megazero.ops.bias_gelu.reference import bias_gelu_reference
from megazero.ops.dispatch import Implementation, Operator, choose


def _bias_gelu_torch(x: Tensor, bias: Tensor | None, exact: bool = False) -> Tensor:
    z = x if bias is None else x + bias
    return F.gelu(z, approximate="none" if exact else "tanh")


BIAS_GELU = Operator(
    "bias_gelu",
    (
        Implementation("torch", _bias_gelu_torch),
        Implementation("reference", bias_gelu_reference),
    ),
)


def bias_gelu(x: Tensor, bias: Tensor | None, exact: bool = False) -> Tensor:
    """gelu(x + bias) for x [..., f] and bias [f] or None; the tanh form unless `exact`."""
    return choose(BIAS_GELU.implementations, x).fn(x, bias, exact)
