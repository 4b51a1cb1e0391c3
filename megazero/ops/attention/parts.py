"""Attention over parts of the keys, for those who merge the parts themselves: no autograd.

Forward gives a part's result with its log-sum-exp. Backward is given the result and the log-sum-exp over
*all* keys, so that what it computes for a part is that part of the whole gradient (ring attention, Liu et al.
2023).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.attention.call import AttentionCall
from megazero.ops.attention.kernel import AttentionKernel, Results, above_all_scores
from megazero.ops.attention.table import chosen
from megazero.ops.chunks import compute_dtype


def forward_of_part(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The result [s, b, n, e] over the keys given, and its log-sum-exp [b, n, s], -inf for an empty row.

    Both are in fp32 (fp64 for fp64), since an error of each part would grow with the number of parts.
    """
    kernel, call = _kernel(q, k, v, call)
    with torch.no_grad():
        return kernel.forward(q, k, v, kernel.prepare(q, k, v, call), compute_dtype(q.dtype))


def backward_of_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    call: AttentionCall,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k, v by the keys given, in fp32 (fp64 for fp64), to be summed over the parts.

    Args:
        q, k, v: [s, b, n, d], [t, b, g, d] and [t, b, g, e].
        out, lse: the result [s, b, n, e] and the log-sum-exp [b, n, s] over all keys.
        grad: the result's gradient, [s, b, n, e].
        call: of this part.
        grad_lse: the log-sum-exp's gradient, [b, n, s].
    """
    kernel, call = _kernel(q, k, v, call)
    with torch.no_grad():
        results = Results(out.to(q.dtype), above_all_scores(lse), grad.to(q.dtype), grad_lse)
        return kernel.backward(q, k, v, results, kernel.prepare(q, k, v, call), compute_dtype(q.dtype))


def merge_part(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the result over more keys into `out` [s, b, n, e], with log-sum-exps [b, n, s]; all in fp32.

    (Milakov & Gimelshein 2018.)
    """
    total = torch.logaddexp(lse, part_lse)
    # Where nothing is seen yet, all are -inf, and the weights 0.
    base = total.masked_fill(total == -torch.inf, 0)
    weights = [(x - base).exp().permute(2, 0, 1).unsqueeze(-1) for x in (lse, part_lse)]
    out.mul_(weights[0]).add_(part * weights[1])
    lse.copy_(total)


def _kernel(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[AttentionKernel, AttentionCall]:
    implementation, call = chosen(q, k, v, call, lse=True)
    kernel = implementation.fn
    assert isinstance(kernel, AttentionKernel), "what gives a log-sum-exp is a kernel"
    return kernel, call
