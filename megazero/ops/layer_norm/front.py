"""The public layer norm and its table of implementations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.ops.dispatch import Implementation, Operator, choose
from megazero.ops.layer_norm.native_cpu import layer_norm_native_cpu
from megazero.ops.layer_norm.reduced_cpu import layer_norm_reduced_cpu
from megazero.ops.layer_norm.reference import layer_norm_reference
from megazero.ops.native import CPU, NATIVE_DTYPES, available


def _layer_norm_torch(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    if weight.dtype == x.dtype:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    # torch's CUDA kernel refuses weights wider than the input, so there the input is widened.
    wide = F.layer_norm(x.to(weight.dtype), x.shape[-1:], weight, bias, eps)
    return wide.to(x.dtype)


_CUDA = frozenset({"cuda"})
_REDUCED = frozenset({torch.bfloat16, torch.float16})
_FULL = frozenset({torch.float32, torch.float64})

LAYER_NORM = Operator(
    "layer_norm",
    (
        Implementation("native_cpu", layer_norm_native_cpu, available, CPU, NATIVE_DTYPES),
        Implementation("reduced_cpu", layer_norm_reduced_cpu, devices=CPU, dtypes=_REDUCED),
        Implementation("torch", _layer_norm_torch, devices=_CUDA),
        Implementation("torch", _layer_norm_torch, devices=CPU, dtypes=_FULL),
        Implementation("reference", layer_norm_reference),
    ),
)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [..., h] normalized over h to mean 0 and variance 1, then times weight [h] plus bias [h].

    Statistics are taken in fp32 even for a bf16 input; the result has x's dtype.
    """
    return choose(LAYER_NORM.implementations, x).fn(x, weight, bias, eps)
