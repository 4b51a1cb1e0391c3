"""Scaled dot-product attention: grouped-query, causal or masked, biased, with counter-based dropout."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megazero.ops.attention.call import AttentionCall, attention_by_document, document_runs
from megazero.ops.attention.flash_cpu import attention_flash_cpu
from megazero.ops.attention.native_cpu import attention_native_cpu
from megazero.ops.attention.reference import attention_reference, attention_sdpa, attention_with_dropout
from megazero.ops.dispatch import CPU, CallFacts, Implementation, Operator, kinds_of_calls, where
from megazero.ops.dropout import AttentionDropout
from megazero.ops.native import on_native_cpu

__all__ = ["ATTENTION", "AttentionCall", "AttentionFacts", "MaskKind", "attention", "attention_with_lse"]

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
        lse: whether the log-sum-exp is needed too.
        bias: whether something is added to the scores.
        one_width: whether values are as wide as queries and keys.
    """

    mask: MaskKind
    dropout: bool
    lse: bool
    bias: bool = False
    one_width: bool = True


def _flash_pays(facts: AttentionFacts) -> bool:
    """Whether the blocked backward pays: torch's is faster in fp32, but lacks our dropout and the lse."""
    return facts.dropout or facts.lse or facts.dtype == torch.bfloat16


_FLASH_PAYS = "pays with dropout, lse or bfloat16 only"

# (q, k, v, call) -> the result, and the log-sum-exp where it is computed
_Attend = Callable[[Tensor, Tensor, Tensor, AttentionCall], tuple[Tensor, Tensor | None]]

ATTENTION: Operator[_Attend] = Operator(
    "attention",
    (
        Implementation("native_cpu", attention_native_cpu, on_native_cpu(bias=False, one_width=True)),
        Implementation(
            "flash_cpu",
            attention_flash_cpu,
            where(CPU, _FLASH_DTYPES, bias=False, one_width=True).needing(_flash_pays, _FLASH_PAYS),
        ),
        Implementation("sdpa", attention_sdpa, where(dropout=False, lse=False), traceable=True),
        Implementation("composed", attention_with_dropout, where(dropout=True, lse=False)),
        Implementation("reference", attention_reference),
    ),
    kinds_of_calls(
        AttentionFacts,
        mask=tuple(MaskKind),
        dropout=(False, True),
        lse=(False, True),
        bias=(False, True),
        one_width=(True, False),
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
    bias: Tensor | None = None,
    dropout: AttentionDropout | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale q k^T + bias) v, [s, b, n e], for q [s, b, n, d], k [t, b, g, d] and v [t, b, g, e].

    g divides n.

    causal: rows are in the order of their positions, and the last query sees the last key, so with s < t the
        queries continue a KV cache.
    mask: bool, broadcastable to [b, n, s, t]; True means that the query may attend to the key.
    document_ids: int [b, t]; a query attends only to keys of its own document.
    bias: broadcastable to [b, n, s, t]; gradients flow through it.
    dropout: counter-based dropout of the probabilities, so every layout drops the same ones.
    scale: 1 / sqrt(d) by default.
    A query that may attend to nothing gives zeros. Raises ValueError if the shapes do not fit together.
    """
    call = AttentionCall(_scale(q, scale), causal, mask, document_ids, bias, dropout)
    whole = mask is None and bias is None and q.shape[0] == k.shape[0]
    # Reads where documents end, which a compiler cannot trace.
    if document_ids is not None and whole and not torch.compiler.is_compiling():
        _check(q, k, v, call)
        runs = document_runs(document_ids)
        if runs is not None:
            return attention_by_document(q, k, v, call, runs, lambda *run: _attend(*run, lse=False)[0])
    return _attend(q, k, v, call, lse=False)[0]


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: AttentionDropout | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention`, and the log-sum-exp of each query's scores: [b, n, s], fp32 (fp64 for fp64).

    With both, attention over parts of the keys can be merged into attention over all of them: it is the sum
    of w_i out_i with weights w_i = exp(lse_i - logsumexp_j lse_j) (Milakov & Gimelshein 2018; ring attention
    of Liu et al. 2023). Gradients flow through both. The log-sum-exp is -inf for a query that may attend to
    nothing. Scores of dropped probabilities count: dropout affects only the result.
    """
    call = AttentionCall(_scale(q, scale), causal, mask, document_ids, bias, dropout)
    out, lse = _attend(q, k, v, call, lse=True)
    assert lse is not None, "the table has no implementation without it for such a call"
    return out, lse


def _scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _attend(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, *, lse: bool
) -> tuple[Tensor, Tensor | None]:
    _check(q, k, v, call)
    if call.causal and q.shape[0] == 1:  # The last query sees all keys.
        call = replace(call, causal=False)
    facts = AttentionFacts.of(
        q,
        mask=_mask_kind(call, q.shape[0] == k.shape[0]),
        dropout=call.dropout is not None,
        lse=lse,
        bias=call.bias is not None,
        one_width=v.shape[-1] == q.shape[-1],
    )
    return ATTENTION.choose(facts).fn(q, k, v, call)


def _mask_kind(call: AttentionCall, square: bool) -> MaskKind:
    if call.mask is not None or (call.causal and not square):
        return MaskKind.DENSE
    if call.document_ids is not None:
        return MaskKind.DOCUMENTS
    return MaskKind.CAUSAL if call.causal else MaskKind.NONE


def _check(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> None:
    if k.shape[:3] != v.shape[:3] or q.shape[1] != k.shape[1] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            "`k` and `v` must be [t, b, g, d] and [t, b, g, e] with q's b and d, but q, k, v are "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; project them from one sequence."
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"`k` must have a number of heads that divides q's ({q.shape[2]}), but has {k.shape[2]}; "
            "set the number of query groups to a divisor of the number of heads."
        )
    if call.dropout is not None:
        call.dropout.check(q.shape[1], q.shape[0], k.shape[0])
