"""Attention as its formula reads (Vaswani et al. 2017; grouped queries: Ainslie et al. 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.chunks import compute_dtype
from megazero.ops.dropout import Dropout, dropout_mask_attention
from megazero.ops.scaled_softmax.reference import scaled_softmax_reference


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    dropout: Dropout | None,
    scale: float,
) -> Tensor:
    """softmax(scale q k^T) v per head, heads taking turns on their group's keys and values."""
    s, b, n, d = q.shape
    repeats = n // k.shape[2]
    wide_q, wide_k, wide_v = (each.to(compute_dtype(q.dtype)) for each in (q, k, v))
    wide_k, wide_v = (each.repeat_interleave(repeats, 2) for each in (wide_k, wide_v))
    scores = torch.einsum("sbnd,tbnd->bnst", wide_q, wide_k)
    probs = scaled_softmax_reference(scores, scale, causal, mask)
    if dropout is not None:
        probs = probs * dropout_mask_attention(dropout, *probs.shape) / (1 - dropout.p)
    return torch.einsum("bnst,tbnd->sbnd", probs, wide_v).reshape(s, b, n * d).to(q.dtype)
