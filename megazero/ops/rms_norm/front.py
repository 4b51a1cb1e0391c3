"""The public RMSNorm and its table of implementations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megazero.ops.dispatch import Implementation, Operator, choose
from megazero.ops.native import CPU, NATIVE_DTYPES, available
from megazero.ops.rms_norm.chunked import rms_norm_chunked
from megazero.ops.rms_norm.native_cpu import rms_norm_native_cpu
from megazero.ops.rms_norm.reference import rms_norm_reference


def _rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.dtype == x.dtype:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, eps).to(x.dtype)


RMS_NORM = Operator(
    "rms_norm",
    (
        Implementation("native_cpu", rms_norm_native_cpu, available, CPU, NATIVE_DTYPES),
        Implementation("torch", _rms_norm_torch, devices=frozenset({"cuda"})),
        Implementation("chunked", rms_norm_chunked, devices=frozenset({"cpu"})),
        Implementation("reference", rms_norm_reference),
    ),
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., h] divided by its root mean square over h, times weight [h].

    The mean is taken in fp32 even for a bf16 input; the result has x's dtype.
    """
    return choose(RMS_NORM.implementations, x).fn(x, weight, eps)
