"""Attention for accelerators: torch's SDPA or, with dropout, a composition that keeps masks exact.

SDPA draws its own dropout from a stream that no other layout can replay, so with dropout the
probabilities are computed and masked here instead. Neither returns the log-sum-exp.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megazero.ops.dropout import AttentionDropout, dropout_mask_attention
from megazero.ops.scaled_softmax import scaled_softmax


def _heads_second(x: Tensor) -> Tensor:
    """[s, b, n, d] -> [b, n, s, d], a view."""
    return x.permute(1, 2, 0, 3)


def attention_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    dropout: AttentionDropout | None,
    scale: float,
) -> tuple[Tensor, None]:
    """Attention without dropout by torch's SDPA, which chooses the kernel."""
    assert dropout is None, "SDPA draws dropout masks of its own"
    s, b, n, d = q.shape
    out = F.scaled_dot_product_attention(
        _heads_second(q),
        _heads_second(k),
        _heads_second(v),
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=k.shape[2] != n,
    )
    return out.permute(2, 0, 1, 3).reshape(s, b, n * d), None


def attention_with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    dropout: AttentionDropout | None,
    scale: float,
    document_ids: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Attention composed of matmuls and our softmax, so that dropout's masks are exact.

    document_ids [b, t] need no mask of their own: the softmax compares them.
    """
    s, b, n, d = q.shape
    repeats = n // k.shape[2]
    keys, values = (_heads_second(x).repeat_interleave(repeats, 1) for x in (k, v))
    scores = _heads_second(q) @ keys.transpose(2, 3)
    probs = scaled_softmax(scores, scale, causal, mask, document_ids=document_ids)
    if dropout is not None:
        probs = probs * dropout_mask_attention(dropout, b, n, s, k.shape[0])
        values = values / (1 - dropout.p)
    return (probs @ values).permute(2, 0, 1, 3).reshape(s, b, n * d), None
