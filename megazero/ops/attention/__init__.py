"""Scaled dot-product attention: grouped-query, causal or masked, biased, with counter-based dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from megazero.ops.attention.call import (
    AttentionCall,
    Bias,
    Part,
    Slopes,
    Softcap,
    attention_by_document,
)
from megazero.ops.attention.documents import Documents, Runs
from megazero.ops.attention.parts import backward_of_part, forward_of_part, merge_part
from megazero.ops.attention.pattern import ALL, CAUSAL, BlockLayout, Pattern
from megazero.ops.attention.scores import largest_score
from megazero.ops.attention.softmax_offset import with_softmax_offset
from megazero.ops.attention.table import (
    ATTENTION,
    AttentionFacts,
    BiasKind,
    HeadKind,
    MaskKind,
    check,
    chosen,
    head_kind,
    holds_all_pairs,
)
from megazero.ops.dropout import AttentionDropout

__all__ = [
    "ALL",
    "ATTENTION",
    "CAUSAL",
    "AttentionCall",
    "AttentionFacts",
    "Bias",
    "BiasKind",
    "BlockLayout",
    "Documents",
    "HeadKind",
    "MaskKind",
    "Part",
    "Pattern",
    "Runs",
    "Slopes",
    "Softcap",
    "attend",
    "attention",
    "backward_of_part",
    "forward_of_part",
    "head_kind",
    "holds_all_pairs",
    "largest_score",
    "merge_part",
    "varying_shapes",
    "with_softmax_offset",
]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    document_ids: Tensor | Documents | None = None,
    bias: Bias | None = None,
    dropout: AttentionDropout | None = None,
    scale: float | None = None,
    pattern: Pattern = ALL,
    part: Part | None = None,
) -> Tensor:
    """softmax(scale q k^T + bias) v, [s, b, n e], for q [s, b, n, d], k [t, b, g, d] and v [t, b, g, e].

    g divides n.

    causal: rows are in the order of their positions, and the last query sees the last key, so with s < t the
        queries continue a KV cache.
    mask: bool, broadcastable to [b, n, s, t]; True means that the query may attend to the key. document_ids:
    int [b, t]; a query attends only to keys of its own document. Pass `Documents` to derive what kernels need
    once for several calls. bias: broadcastable to [b, n, s, t]; gradients flow through it. Or `Slopes`
    (ALiBi), or a `Softcap` of the scores. dropout: counter-based dropout of the probabilities, so every
    layout drops the same ones. scale: 1 / sqrt(d) by default. pattern: which keys a query may attend to by
    position: windows, sinks, a prefix, blocks. part: where queries and keys lie in their sequence. By default
    the keys are the sequence from its
        beginning, and the last query has the last key.
    A query that may attend to nothing gives zeros. Raises ValueError if the shapes do not fit together.
    """
    documents = Documents(document_ids) if isinstance(document_ids, Tensor) else document_ids
    call = AttentionCall(_scale(q, scale), mask, documents, bias, dropout, pattern.causally(causal), part)
    return attend(q, k, v, call)


def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, offset: Tensor | None = None) -> Tensor:
    """`attention` with its options as one value, [s, b, n e]; for `offset` [n] see `with_softmax_offset`."""
    if offset is not None:
        out, lse = _attend(q, k, v, call, lse=True)
        assert lse is not None, "the table has no implementation without it for such a call"
        return with_softmax_offset(out, lse, offset)
    plain = call.mask is None and call.bias is None and call.part is None and q.shape[0] == k.shape[0]
    plain = plain and call.pattern.prefix == 0 and call.pattern.layout is None
    # Reads where documents end, which a compiler cannot trace.
    if call.documents is not None and plain and not torch.compiler.is_compiling():
        check(q, k, v, call)
        if call.documents.lengths is not None:
            alone = partial(_attend, lse=False)
            return attention_by_document(q, k, v, call, call.documents.lengths, lambda *run: alone(*run)[0])
    return _attend(q, k, v, call, lse=False)[0]


@contextmanager
def varying_shapes(vary: bool = True) -> Iterator[None]:
    """A context in which torch's attention on a GPU does not use cuDNN if shapes `vary`.

    cuDNN plans each new shape, which takes as long as hundreds of calls, and keeps all plans. With constant
    shapes it is the fastest on Hopper, and torch's first choice.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before and not vary)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _attend(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, *, lse: bool
) -> tuple[Tensor, Tensor | None]:
    implementation, call = chosen(q, k, v, call, lse=lse)
    return implementation.fn(q, k, v, call)
