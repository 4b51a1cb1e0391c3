"""Scaled dot-product attention: grouped-query, causal or masked, biased, with counter-based dropout."""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megazero.ops.attention.call import AttentionCall, Part, Slopes, attention_by_document
from megazero.ops.attention.cuda import MOST_SIZE, attention_cuda, attention_examples
from megazero.ops.attention.documents import Documents, Runs
from megazero.ops.attention.flash_cpu import attention_flash_cpu
from megazero.ops.attention.native_cpu import attention_native_cpu
from megazero.ops.attention.parts import backward_of_part
from megazero.ops.attention.pattern import ALL, BlockLayout, Pattern
from megazero.ops.attention.reference import attention_reference, attention_sdpa, attention_with_dropout
from megazero.ops.attention.varlen import attention_varlen, varlen_knows
from megazero.ops.cuda import on_cuda_kernels, planned
from megazero.ops.dispatch import CPU, CUDA, CallFacts, Implementation, Operator, kinds_of_calls, where
from megazero.ops.dropout import AttentionDropout
from megazero.ops.native import on_native_cpu

__all__ = [
    "ALL",
    "ATTENTION",
    "AttentionCall",
    "AttentionFacts",
    "BlockLayout",
    "Documents",
    "HeadKind",
    "MaskKind",
    "Part",
    "Pattern",
    "Runs",
    "Slopes",
    "attention",
    "attention_with_lse",
    "backward_of_part",
    "forward_of_part",
    "holds_all_pairs",
    "varying_shapes",
]

_FLASH_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16})
_NARROW_FLOATS = frozenset({torch.bfloat16, torch.float16})


class MaskKind(enum.Enum):
    """The most general restriction of the keys that a query may attend to in a call."""

    NONE = "none"
    CAUSAL = "causal"
    WINDOW = "window"
    RUNS = "runs"  # documents whose runs are known, causal or not, if torch's varlen takes such heads
    DOCUMENTS = "documents"
    DENSE = "dense"


class HeadKind(enum.Enum):
    """The widths of queries, keys and values in a call."""

    ALIKE = "alike"
    WIDE = "wide"  # alike, of more than 128 channels
    UNLIKE = "unlike"  # values have another width than queries and keys


@dataclass(frozen=True)
class AttentionFacts(CallFacts):
    """The facts that decide which implementation runs.

    Attributes:
        mask: the restriction of the keys that a query may attend to.
        dropout: whether probabilities are dropped.
        lse: whether the log-sum-exp is needed too.
        bias: whether something is added to the scores.
        heads: the widths of queries, keys and values.
    """

    mask: MaskKind
    dropout: bool
    lse: bool
    bias: bool = False
    heads: HeadKind = HeadKind.ALIKE


def _flash_pays(facts: AttentionFacts) -> bool:
    """Whether the blocked backward pays: torch's is faster in fp32, but lacks our dropout and the lse."""
    return facts.dropout or facts.lse or facts.dtype == torch.bfloat16


_FLASH_PAYS = "pays with dropout, lse or bfloat16 only"


def _cuda_pays(facts: AttentionFacts) -> bool:
    """Whether our kernels do what torch's fastest do not."""
    return facts.dropout or facts.lse or _masked(facts)


def _masked(facts: AttentionFacts) -> bool:
    return facts.mask not in (MaskKind.NONE, MaskKind.CAUSAL)


def _one_width(facts: AttentionFacts) -> bool:
    return facts.heads is not HeadKind.UNLIKE


_ONE_WIDTH = "serves values as wide as keys only"
_CUDA_PAYS = "pays with dropout, lse or a mask only"


def _varlen_serves(facts: AttentionFacts) -> bool:
    return varlen_knows(grouped=False)


_VARLEN_SERVES = "is not in this torch"

# (q, k, v, call) -> the result, and the log-sum-exp where it is computed
_Attend = Callable[[Tensor, Tensor, Tensor, AttentionCall], tuple[Tensor, Tensor | None]]

ATTENTION: Operator[_Attend] = Operator(
    "attention",
    (
        Implementation(
            "native_cpu", attention_native_cpu, on_native_cpu(bias=False).needing(_one_width, _ONE_WIDTH)
        ),
        Implementation(
            "flash_cpu",
            attention_flash_cpu,
            where(CPU, _FLASH_DTYPES, bias=False)
            .needing(_one_width, _ONE_WIDTH)
            .needing(_flash_pays, _FLASH_PAYS),
        ),
        Implementation(
            "varlen",
            attention_varlen,
            where(
                CUDA,
                _NARROW_FLOATS,
                mask=MaskKind.RUNS,
                dropout=False,
                lse=False,
                bias=False,
                heads=HeadKind.ALIKE,
            ).needing(_varlen_serves, _VARLEN_SERVES),
            traceable=True,
        ),
        Implementation(
            "cuda",
            attention_cuda,
            on_cuda_kernels(bias=False, heads=HeadKind.ALIKE).needing(_cuda_pays, _CUDA_PAYS),
        ),
        # On a GPU torch's kernels take heads of other widths, and hold as much.
        planned(attention_cuda, bias=False),
        Implementation("sdpa", attention_sdpa, where(dropout=False, lse=False), traceable=True),
        Implementation("composed", attention_with_dropout, where(dropout=True, lse=False)),
        Implementation("reference", attention_reference),
    ),
    (
        *kinds_of_calls(AttentionFacts, mask=tuple(MaskKind), dropout=(False, True), lse=(False, True)),
        # In these the mask does not matter.
        *kinds_of_calls(
            AttentionFacts,
            mask=(MaskKind.NONE, MaskKind.CAUSAL, MaskKind.DOCUMENTS, MaskKind.DENSE),
            dropout=(False, True),
            lse=(False, True),
            bias=(False, True),
            heads=tuple(HeadKind),
        )[1:],
    ),
    examples=attention_examples,
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    document_ids: Tensor | Documents | None = None,
    bias: Tensor | Slopes | None = None,
    dropout: AttentionDropout | None = None,
    scale: float | None = None,
    pattern: Pattern = ALL,
    part: Part | None = None,
) -> Tensor:
    """softmax(scale q k^T + bias) v, [s, b, n e], for q [s, b, n, d], k [t, b, g, d] and v [t, b, g, e].

    g divides n.

    causal: rows are in the order of their positions, and the last query sees the last key, so with s < t the
        queries continue a KV cache.
    mask: bool, broadcastable to [b, n, s, t]; True means that the query may attend to the key.
    document_ids: int [b, t]; a query attends only to keys of its own document. As `Documents`, what kernels
        need to know of them is found once for all calls that are given the value.
    bias: broadcastable to [b, n, s, t]; gradients flow through it. Or `Slopes` by the distance of a key.
    dropout: counter-based dropout of the probabilities, so every layout drops the same ones.
    scale: 1 / sqrt(d) by default.
    pattern: which keys a query may attend to by its place: windows, sinks, a prefix, blocks.
    part: where queries and keys lie in their sequence. By default the keys are the sequence from its
        beginning, and the last query has the last key.
    A query that may attend to nothing gives zeros. Raises ValueError if the shapes do not fit together.
    """
    documents = Documents(document_ids) if isinstance(document_ids, Tensor) else document_ids
    call = AttentionCall(_scale(q, scale), causal, mask, documents, bias, dropout, pattern, part)
    whole = mask is None and bias is None and q.shape[0] == k.shape[0] and part is None
    whole = whole and pattern.prefix == 0 and pattern.layout is None
    # Reads where documents end, which a compiler cannot trace.
    if documents is not None and whole and not torch.compiler.is_compiling():
        _check(q, k, v, call)
        if documents.lengths is not None:
            plain = partial(_attend, lse=False)
            return attention_by_document(q, k, v, call, documents.lengths, lambda *run: plain(*run)[0])
    return _attend(q, k, v, call, lse=False)[0]


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    document_ids: Tensor | Documents | None = None,
    bias: Tensor | Slopes | None = None,
    dropout: AttentionDropout | None = None,
    scale: float | None = None,
    pattern: Pattern = ALL,
    part: Part | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention`, and the log-sum-exp of each query's scores: [b, n, s], fp32 (fp64 for fp64).

    With both, attention over parts of the keys can be merged into attention over all of them: it is the sum
    of w_i out_i with weights w_i = exp(lse_i - logsumexp_j lse_j) (Milakov & Gimelshein 2018; ring attention
    of Liu et al. 2023). Gradients flow through both. The log-sum-exp is -inf for a query that may attend to
    nothing. Scores of dropped probabilities count: dropout affects only the result.
    """
    documents = Documents(document_ids) if isinstance(document_ids, Tensor) else document_ids
    call = AttentionCall(_scale(q, scale), causal, mask, documents, bias, dropout, pattern, part)
    out, lse = _attend(q, k, v, call, lse=True)
    assert lse is not None, "the table has no implementation without it for such a call"
    return out, lse


def forward_of_part(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The result [s, b, n, e] over the keys given, and its log-sum-exp [b, n, s], -inf for an empty row.

    For those who merge parts themselves: no autograd (see `backward_of_part`).
    """
    with torch.no_grad():
        out, lse = _attend(q, k, v, call, lse=True)
    assert lse is not None, "the table has no implementation without it for such a call"
    return out.view(*q.shape[:3], -1), lse


@contextmanager
def varying_shapes(vary: bool = True) -> Iterator[None]:
    """A context in which torch's attention on a GPU leaves cuDNN out if shapes `vary`.

    cuDNN makes a plan for each new shape, which takes as long as hundreds of calls, and keeps all of them.
    Where shapes stay the same it is the fastest on Hopper, and torch's first choice.
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
    _check(q, k, v, call)
    call = call.masked(q, k)
    if call.causal and q.shape[0] == 1:  # The last query sees all keys.
        call = replace(call, causal=False)
    facts = AttentionFacts.of(
        q,
        mask=_mask_kind(call, q.shape[0] == k.shape[0], q.shape[2] != k.shape[2]),
        dropout=call.dropout is not None,
        lse=lse,
        bias=call.bias is not None,
        heads=_head_kind(q.shape[-1], v.shape[-1]),
    )
    chosen = ATTENTION.choose(facts)
    if holds_all_pairs(chosen.name, facts) and not torch.compiler.is_compiling():
        _warn_of_all_pairs(chosen.name, facts)
    return chosen.fn(q, k, v, call)


def holds_all_pairs(name: str, facts: AttentionFacts) -> bool:
    """Whether that implementation holds a tensor of all pairs of queries and keys for a call on a GPU."""
    masks = name == "sdpa" and (facts.bias or _masked(facts))
    return facts.device == "cuda" and (masks or name in ("composed", "reference"))


def _warn_of_all_pairs(name: str, facts: AttentionFacts) -> None:
    """Warn, once for each reason."""
    reasons = dict(ATTENTION.passed_over(facts))
    warnings.warn(
        f"attention on the GPU runs as `{name}` (`cuda` {reasons['cuda']}), which holds a tensor of all "
        "pairs of queries and keys; see `megazero env` for the calls that need none.",
        stacklevel=4,
    )


def _head_kind(size: int, values: int) -> HeadKind:
    if values != size:
        return HeadKind.UNLIKE
    return HeadKind.WIDE if size > MOST_SIZE else HeadKind.ALIKE


def _mask_kind(call: AttentionCall, square: bool, grouped: bool) -> MaskKind:
    """The kind of mask; causality of fewer queries than keys is a window too."""
    documents, hidden = call.documents, call.pattern.window is not None or (call.causal and not square)
    if call.mask is not None:
        return MaskKind.DENSE
    if documents is not None:
        whole = documents.runs is not None and square and call.pattern.idle
        return MaskKind.RUNS if whole and not (grouped and not varlen_knows(grouped)) else MaskKind.DOCUMENTS
    if hidden:
        return MaskKind.WINDOW
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
    if call.documents is not None:
        given, (t, b), s = list(call.documents.ids.shape), k.shape[:2], q.shape[0]
        if given != [b, t] or s > t:
            raise ValueError(
                f"`document_ids` must be [{b}, {t}] for at most as many queries, but is {given} for {s}; "
                "give each key the id of its document."
            )
    if call.dropout is not None:
        call.dropout.check(q.shape[1], q.shape[0], k.shape[0])
