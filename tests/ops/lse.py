"""Attention with its log-sum-exp, by whichever implementation the table chooses."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from megazero.ops.attention import ALL, AttentionCall, Documents, Pattern
from megazero.ops.attention.table import chosen


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    document_ids: Tensor | Documents | None = None,
    scale: float | None = None,
    pattern: Pattern = ALL,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """`attention`, and the log-sum-exp of each query's scores: [b, n, s], fp32 (fp64 for fp64).

    It is -inf for a query that may attend to nothing. `more` holds other fields of the call.
    """
    documents = Documents(document_ids) if isinstance(document_ids, Tensor) else document_ids
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    call = AttentionCall(scale, documents=documents, pattern=pattern.causally(causal), **more)
    implementation, call = chosen(q, k, v, call, lse=True)
    out, lse = implementation.fn(q, k, v, call)
    assert lse is not None, "the table has no implementation without it for such a call"
    return out, lse
