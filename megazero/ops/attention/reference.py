"""Attention as its formula reads (Vaswani et al. 2017; grouped queries: Ainslie et al. 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.chunks import compute_dtype
from megazero.ops.dropout import AttentionDropout, dropout_mask_attention
from megazero.ops.scaled_softmax import masked_scores


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    dropout: AttentionDropout | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v per head, where the heads of a group share its keys and values.

    The second result is the log of the softmax's denominator, [b, n, s], -inf where there is nothing to
    attend to.
    """
    s, b, n, d = q.shape
    repeats = n // k.shape[2]
    wide_q, wide_k, wide_v = (x.to(compute_dtype(q.dtype)) for x in (q, k, v))
    wide_k, wide_v = (x.repeat_interleave(repeats, 2) for x in (wide_k, wide_v))
    scores = torch.einsum("sbnd,tbnd->bnst", wide_q, wide_k)
    wide_scores, none_allowed = masked_scores(scores, scale, causal, mask)
    lse = torch.logsumexp(wide_scores, -1).masked_fill(none_allowed.squeeze(-1), -torch.inf)
    probs = torch.softmax(wide_scores, -1).masked_fill(none_allowed, 0)
    if dropout is not None:
        probs = probs * dropout_mask_attention(dropout, *probs.shape) / (1 - dropout.p)
    out = torch.einsum("bnst,tbnd->sbnd", probs, wide_v).reshape(s, b, n * d).to(q.dtype)
    return out, lse
