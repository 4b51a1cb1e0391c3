"""Scaled, masked softmax as its formula reads."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.chunks import compute_dtype


def may_attend(q: int, k: int, device: torch.device) -> Tensor:
    """bool [q, k], True on and before the diagonal; with q != k the last query sees the last key."""
    return torch.ones(q, k, dtype=torch.bool, device=device).tril(k - q)


def same_document(document_ids: Tensor, q: int) -> Tensor:
    """bool [b, 1, q, k], True for keys of the query's document; ids are [b, k], the last query's the last."""
    k = document_ids.shape[1]
    return document_ids[:, None, k - q :, None] == document_ids[:, None, None, :]


def masked_scores(
    scores: Tensor, scale: float, causal: bool, mask: Tensor | None, document_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """scale * scores, -inf where a key may not be attended to; and bool [..., q, 1], True where none may be.

    A row with nothing to attend to has zeros instead, because softmax of all -inf has no gradient.
    """
    wide = scores.to(compute_dtype(scores.dtype)) * scale
    allowed = torch.ones_like(wide, dtype=torch.bool)
    if causal:
        allowed = allowed & may_attend(scores.shape[-2], scores.shape[-1], scores.device)
    if mask is not None:
        allowed = allowed & mask
    if document_ids is not None:
        allowed = allowed & same_document(document_ids, scores.shape[-2])
    none_allowed = ~allowed.any(-1, keepdim=True)
    return wide.masked_fill(~allowed, -torch.inf).masked_fill(none_allowed, 0), none_allowed


def scaled_softmax_reference(
    scores: Tensor, scale: float, causal: bool, mask: Tensor | None, *, document_ids: Tensor | None = None
) -> Tensor:
    """exp(scale * scores) over the keys that may be attended to, divided by its sum; zeros if none may be."""
    wide, none_allowed = masked_scores(scores, scale, causal, mask, document_ids)
    return torch.softmax(wide, -1).masked_fill(none_allowed, 0).to(scores.dtype)
