"""The public attention, its masks, and its table of implementations."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.ops.attention.composed import attention_sdpa, attention_with_dropout
from megazero.ops.attention.documents import attention_by_document, document_runs
from megazero.ops.attention.flash_cpu import attention_flash_cpu
from megazero.ops.attention.native_cpu import attention_native_cpu
from megazero.ops.attention.reference import attention_reference
from megazero.ops.dispatch import CPU, CallFacts, Implementation, Operator, kinds_of_calls, where
from megazero.ops.dropout import AttentionDropout
from megazero.ops.native import on_native_cpu
from megazero.ops.scaled_softmax import may_attend, same_document

_FLASH_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16})


class MaskKind(enum.Enum):
    """The most general restriction of the keys that a query may attend to in a call."""

    NONE = "none"
    CAUSAL = "causal"
    DOCUMENTS = "documents"
    DENSE = "dense"


@dataclass(frozen=True)
class AttentionFacts(CallFacts):
    """The facts that decide which implementation runs.

    Attributes:
        mask: the restriction of the keys that a query may attend to.
        dropout: whether probabilities are dropped.
        head_size: channels per head.
        lse: whether the log-sum-exp is needed too.
    """

    mask: MaskKind
    dropout: bool
    head_size: int
    lse: bool


def _flash_pays(facts: AttentionFacts) -> bool:
    """Whether the blocked backward pays: torch's is faster in fp32, but lacks our dropout and the lse."""
    return facts.dropout or facts.lse or facts.dtype == torch.bfloat16


_FLASH_PAYS = "pays with dropout, lse or bfloat16 only"


# (q, k, v, mask, causal, dropout, scale) -> the result, and the log-sum-exp where it is computed
_Attend = Callable[
    [Tensor, Tensor, Tensor, Tensor | None, bool, AttentionDropout | None, float],
    tuple[Tensor, Tensor | None],
]

ATTENTION: Operator[_Attend] = Operator(
    "attention",
    (
        Implementation("native_cpu", attention_native_cpu, on_native_cpu()),
        Implementation(
            "flash_cpu", attention_flash_cpu, where(CPU, _FLASH_DTYPES).needing(_flash_pays, _FLASH_PAYS)
        ),
        Implementation("sdpa", attention_sdpa, where(dropout=False, lse=False), traceable=True),
        Implementation("composed", attention_with_dropout, where(dropout=True, lse=False)),
        Implementation("reference", attention_reference),
    ),
    kinds_of_calls(
        AttentionFacts,
        mask=tuple(MaskKind),
        dropout=(False, True),
        head_size=(64, 80, 257),
        lse=(False, True),
    ),
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    dropout: AttentionDropout | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale q k^T) v, [s, b, n d], for q [s, b, n, d] and k, v [t, b, g, d], g dividing n.

    causal: rows are in the order of their positions, and the last query sees the last key, so with s < t the
        queries continue a KV cache.
    mask: bool, broadcastable to [b, n, s, t]; True means that the query may attend to the key.
    document_ids: int [b, t]; a query attends only to keys of its own document.
    dropout: counter-based dropout of the probabilities, so every layout drops the same ones.
    scale: 1 / sqrt(d) by default.
    A query that may attend to nothing gives zeros. Raises ValueError if the shapes do not fit together.
    """
    whole = mask is None and q.shape[0] == k.shape[0]
    # Reads where documents end, which a compiler cannot trace.
    if document_ids is not None and whole and not torch.compiler.is_compiling():
        _check(q, k, v, dropout)
        runs = document_runs(document_ids)
        if runs is not None:

            def attend(q: Tensor, k: Tensor, v: Tensor, dropout: AttentionDropout | None) -> Tensor:
                return _attend(q, k, v, causal, None, None, dropout, scale, lse=False)[0]

            return attention_by_document(q, k, v, runs, dropout, attend)
    return _attend(q, k, v, causal, mask, document_ids, dropout, scale, lse=False)[0]


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    dropout: AttentionDropout | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention`, and the log-sum-exp of each query's scaled scores: [b, n, s], fp32 (fp64 for fp64).

    With both, attention over parts of the keys can be merged into attention over all of them: it is the sum
    of w_i out_i with weights w_i = exp(lse_i - logsumexp_j lse_j) (Milakov & Gimelshein 2018; ring attention
    of Liu et al. 2023). Gradients flow through both. The log-sum-exp is -inf for a query that may attend to
    nothing. Scores of dropped probabilities count: dropout affects only the result.
    """
    out, lse = _attend(q, k, v, causal, mask, document_ids, dropout, scale, lse=True)
    assert lse is not None, "the table has no implementation without it for such a call"
    return out, lse


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    mask: Tensor | None,
    document_ids: Tensor | None,
    dropout: AttentionDropout | None,
    scale: float | None,
    lse: bool,
) -> tuple[Tensor, Tensor | None]:
    _check(q, k, v, dropout)
    s, t = q.shape[0], k.shape[0]
    causal = causal and s > 1
    facts = AttentionFacts.of(
        q,
        mask=_mask_kind(mask, document_ids, causal, s, t),
        dropout=dropout is not None,
        head_size=q.shape[-1],
        lse=lse,
    )
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    fn = ATTENTION.choose(facts).fn
    if fn is attention_with_dropout and document_ids is not None:
        # It compares the ids itself, and needs no mask [b, 1, s, t] of them.
        mask, ids = _joined_mask(mask, None, causal, s, t, q.device), document_ids.expand(q.shape[1], t)
        return attention_with_dropout(q, k, v, mask, causal, dropout, scale, document_ids=ids)
    mask = _joined_mask(mask, document_ids, causal, s, t, q.device)
    return fn(q, k, v, mask, causal, dropout, scale)


def _mask_kind(mask: Tensor | None, document_ids: Tensor | None, causal: bool, s: int, t: int) -> MaskKind:
    if mask is not None or (causal and s != t):
        return MaskKind.DENSE
    if document_ids is not None:
        return MaskKind.DOCUMENTS
    return MaskKind.CAUSAL if causal else MaskKind.NONE


def _joined_mask(
    mask: Tensor | None, document_ids: Tensor | None, causal: bool, s: int, t: int, device: torch.device
) -> Tensor | None:
    """One bool mask [b or 1, n or 1, s, t] of all restrictions, or None if `causal` alone expresses them."""
    if document_ids is not None:
        own = same_document(document_ids, s)
        mask = own if mask is None else mask & own
    if causal and (mask is not None or s != t):
        order = may_attend(s, t, device)
        mask = order if mask is None else mask & order
    if mask is None:
        return None
    return mask.view((1,) * (4 - mask.dim()) + mask.shape).expand(-1, -1, s, t)


def _check(q: Tensor, k: Tensor, v: Tensor, dropout: AttentionDropout | None) -> None:
    if k.shape != v.shape or q.shape[1] != k.shape[1] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            "`k` and `v` must be [t, b, g, d] with q's b and d, but q, k, v are "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; project them from one sequence."
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"`k` must have a number of heads that divides q's ({q.shape[2]}), but has {k.shape[2]}; "
            "set the number of query groups to a divisor of the number of heads."
        )
    if dropout is not None:
        dropout.check(q.shape[1], q.shape[0], k.shape[0])
