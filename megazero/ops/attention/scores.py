"""The scores of attention themselves, which no kernel writes down: for those who watch them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megazero.ops.attention.call import AttentionCall, Part, over_pairs
from megazero.ops.chunks import compute_dtype
from megazero.ops.scaled_softmax import may_attend

TILE = 1 << 22
"""The most scores that exist at a time."""


@torch.no_grad()
def largest_score(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
    """The largest product of a query and a key that it may attend to, times the call's scale.

    Biases of scores, a bound of them and an offset of the softmax come after it. It takes one product more,
    of a few queries at a time.

    Args:
        q: [s, b, n, d].
        k: [t, b, g, d].
        call: says which keys a query may attend to.

    Returns:
        A scalar in fp32 (fp64 for fp64); -inf if no query may attend to any key.
    """
    (s, b, n, _), (t, _, groups, _), wide = q.shape, k.shape, compute_dtype(q.dtype)
    largest = torch.full((), -torch.inf, dtype=wide, device=q.device)
    keys, rows = k.to(wide), max(1, TILE // max(1, b * n * t))
    for first in range(0, s, rows):
        queries = q[first : first + rows].to(wide)
        count = len(queries)
        scores = torch.einsum("sbgrd,tbgd->bgrst", queries.unflatten(2, (groups, -1)), keys)
        own = _restrictions(call, range(first, first + count), s, t)
        alone = own.causal_alone(count, t)
        allowed = may_attend(count, t, q.device) if alone else own.allowed(queries, keys)
        scores = scores.flatten(1, 2) * call.scale
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        largest = torch.maximum(largest, scores.amax()) if scores.numel() else largest
    return largest


def _restrictions(call: AttentionCall, rows: range, s: int, t: int) -> AttentionCall:
    """The restrictions of a call alone, for some of its s queries over all t keys."""
    queries, keys = call.places(s, t)
    ids = None if call.documents is None else call.query_ids(s)[:, rows.start : rows.stop]
    begins = None if call.part is None else call.part.begins
    mask = None if call.mask is None else over_pairs(call.mask, s, t)[:, :, rows.start : rows.stop]
    part = Part(queries.start + rows.start, keys.start, ids, begins)
    return replace(call, mask=mask, part=part, bias=None, dropout=None)
