"""`AttentionKernel`: both passes of attention as plain functions, and the autograd Function that runs them.

Code that merges attention over parts of the keys (ring attention, Liu et al. 2023) calls the passes itself;
other code calls the kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megazero.ops.attention.call import AttentionCall
from megazero.ops.autograd import Context, Gradients, apply, once_differentiable


@dataclass(frozen=True, eq=False)
class Results:
    """A call's results and their gradients, for a backward pass.

    Attributes:
        out, lse: the result [s, b, n, d] and the log-sum-exp [b, n, s], -inf for an empty row. Over all keys,
            if the call has part of them.
        grad: the result's gradient, [s, b, n, d].
        grad_lse: that of the log-sum-exp, [b, n, s]; None: zeros.
    """

    out: Tensor
    lse: Tensor
    grad: Tensor
    grad_lse: Tensor | None = None


def above_all_scores(lse: Tensor) -> Tensor:
    """The log-sum-exp with a large number in empty rows, so that their probabilities become 0."""
    return lse.masked_fill(lse == -torch.inf, 1e30)


def strides(x: Tensor, dims: int) -> list[int]:
    """Strides of the first dims, 0 where x is broadcast, as kernels are given them."""
    return [x.stride(dim) if x.shape[dim] > 1 else 0 for dim in range(dims)]


class AttentionKernel(ABC):
    """Attention with its log-sum-exp. Both passes run without autograd."""

    @abstractmethod
    def prepare(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> object:
        """Return what both passes need to know of the call, in the kernel's own form."""

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, given: Any, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The contiguous result [s, b, n, e] in `dtype`, and the log-sum-exp [b, n, s]."""

    @abstractmethod
    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, results: Results, given: Any, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v in `dtype`; an empty row has none."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """The result [s, b, n e] and the log-sum-exp, recorded for backward."""
        dropout, mask = call.dropout, call.mask
        keys = None if dropout is None else dropout.keys
        return apply(_Attention, q, k, v, mask, keys, call, self)


class _Attention(torch.autograd.Function):
    """The call's own tensors are given beside it, for autograd to save: a recomputed layer drops them.

    A kernel's own form of a call is computed again in backward, since it is much larger than the call.
    """

    @staticmethod
    def forward(
        ctx: Context[tuple[AttentionCall, AttentionKernel]],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        keys: Tensor | None,
        call: AttentionCall,
        kernel: AttentionKernel,
    ) -> tuple[Tensor, Tensor]:
        out, lse = kernel.forward(q, k, v, kernel.prepare(q, k, v, call), q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, mask, keys)
        ctx.kept = _without(call), kernel
        ctx.set_materialize_grads(False)
        return out.flatten(2), lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Context[tuple[AttentionCall, AttentionKernel]], grad: Tensor | None, grad_lse: Tensor | None
    ) -> Gradients:
        (q, k, v, out, lse, mask, keys), (call, kernel) = ctx.saved_tensors, ctx.kept
        grad = torch.zeros_like(out) if grad is None else grad.view(out.shape)
        results, call = Results(out, lse, grad, grad_lse), _with(call, mask, keys)
        return *kernel.backward(q, k, v, results, kernel.prepare(q, k, v, call), q.dtype), *(None,) * 4


def _without(call: AttentionCall) -> AttentionCall:
    """The call without its mask and the keys of its dropout, which are its own."""
    dropout = call.dropout
    if dropout is None:
        return call if call.mask is None else replace(call, mask=None)
    return replace(call, mask=None, dropout=replace(dropout, keys=dropout.keys.new_empty(0)))


def _with(call: AttentionCall, mask: Tensor | None, keys: Tensor | None) -> AttentionCall:
    dropout = call.dropout
    if dropout is not None and keys is not None:
        dropout = replace(dropout, keys=keys)
    return replace(call, mask=mask, dropout=dropout)
