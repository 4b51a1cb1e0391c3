"""Attention over parts of the keys, for those who merge the parts themselves: no autograd.

Forward gives a part's result with its log-sum-exp. Backward is given the result and the log-sum-exp over
*all* keys, so that what it computes for a part is that part of the whole gradient (ring attention, Liu et al.
2023).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.attention.call import AttentionCall
from megazero.ops.chunks import compute_dtype
from megazero.ops.dropout import dropout_mask_attention


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
    """The gradients of q, k, v by the keys given.

    Args:
        q, k, v: [s, b, n, d], [t, b, g, d] and [t, b, g, e].
        out, lse: the result [s, b, n, e] and the log-sum-exp [b, n, s] over all keys.
        grad: the result's gradient, [s, b, n, e].
        call: of this part.
        grad_lse: the log-sum-exp's gradient, [b, n, s].
    """
    with torch.no_grad():
        wide, repeats = compute_dtype(q.dtype), q.shape[2] // k.shape[2]
        q, k, v, out, grad = (x.to(wide) for x in (q, k, v, out, grad))
        keys, values = (x.repeat_interleave(repeats, 2) for x in (k, v))
        scores = torch.einsum("sbnd,tbnd->bnst", q, keys) * call.scale
        if (biases := call.biases(q.shape[0], k.shape[0])) is not None:
            scores = scores + biases
        mask = call.allowed(q, k)
        if mask is None and call.causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(len(k) - len(q))
        safe = lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)
        probs = (scores - safe).exp()
        if mask is not None:
            probs = probs.masked_fill(~mask, 0)
        kept = probs
        grad_probs = torch.einsum("sbne,tbne->bnst", grad, values)
        if call.dropout is not None:
            factor = dropout_mask_attention(call.dropout, *probs.shape) / (1 - call.dropout.p)
            kept, grad_probs = probs * factor, grad_probs * factor
        delta = torch.linalg.vecdot(grad, out).permute(1, 2, 0).unsqueeze(-1)
        if grad_lse is not None:
            delta = delta - grad_lse.unsqueeze(-1)
        grad_scores = probs * (grad_probs - delta) * call.scale
        grad_q = torch.einsum("bnst,tbnd->sbnd", grad_scores, keys)
        grad_k = torch.einsum("bnst,sbnd->tbnd", grad_scores, q)
        grad_v = torch.einsum("bnst,sbne->tbne", kept, grad)
        grad_k, grad_v = (x.unflatten(2, (-1, repeats)).sum(3) for x in (grad_k, grad_v))
    return grad_q, grad_k, grad_v
