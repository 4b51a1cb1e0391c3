"""The table of attention's implementations, the facts of a call that decide between them, and its checks."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.ops.attention.call import AttentionCall, Bias, Slopes, Softcap
from megazero.ops.attention.cuda import (
    MOST_SIZE,
    attention_cuda,
    attention_cuda_by_mask,
    attention_examples,
    attention_planned,
)
from megazero.ops.attention.flash_cpu import attention_flash_cpu
from megazero.ops.attention.flex import attention_flex, flex_compiles
from megazero.ops.attention.native_cpu import attention_native_cpu
from megazero.ops.attention.pattern import ALL, CAUSAL, BlockLayout
from megazero.ops.attention.reference import attention_reference, attention_sdpa, attention_with_dropout
from megazero.ops.attention.varlen import attention_varlen, varlen_knows
from megazero.ops.cuda import CUDA_DTYPES, on_cuda_kernels
from megazero.ops.dispatch import (
    CPU,
    CUDA,
    META,
    TRAINING_FLOATS,
    CallFacts,
    Implementation,
    Operator,
    Requirement,
    kinds_of_calls,
    where,
)
from megazero.ops.native import on_native_cpu

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
    PART = "part"  # queries that are not the last keys, masked or not
    PATTERN = "pattern"  # sinks, a prefix or blocks, with anything else


class BiasKind(enum.Enum):
    """The kind of a call's biases, or a softcap."""

    NONE = "none"
    SLOPES = "slopes"  # by distance
    TENSOR = "tensor"
    SOFTCAP = "softcap"  # a bound of the scores instead


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
        bias: the biases of the scores, or a bound of them.
        heads: the widths of queries, keys and values.
    """

    mask: MaskKind
    dropout: bool
    lse: bool
    bias: BiasKind = BiasKind.NONE
    heads: HeadKind = HeadKind.ALIKE


def _masked(facts: AttentionFacts) -> bool:
    return facts.mask not in (MaskKind.NONE, MaskKind.CAUSAL)


def _in_order(facts: AttentionFacts) -> bool:
    return facts.mask not in (MaskKind.PART, MaskKind.PATTERN)


# torch's blocked backward is faster in fp32, but lacks our dropout and the lse.
_FLASH_PAYS = Requirement(
    lambda facts: facts.dropout or facts.lse or facts.dtype == torch.bfloat16,
    "pays with dropout, lse or bfloat16 only",
)
# Our kernels do what torch's fastest do not.
_CUDA_PAYS = Requirement(
    lambda facts: facts.dropout or facts.lse or _masked(facts), "pays with dropout, lse or a mask only"
)
_IN_ORDER = Requirement(_in_order, "knows no sinks, prefix, blocks or places of parts")
_RESTRICTED = Requirement(
    lambda facts: not _in_order(facts), "pays with sinks, a prefix, blocks or places of parts only"
)
_FLEX_PAYS = Requirement(
    lambda facts: facts.mask is MaskKind.PATTERN or facts.bias in (BiasKind.SLOPES, BiasKind.SOFTCAP),
    "pays with sinks, a prefix, blocks, biases by distance or a softcap only",
)
_FLEX_SERVES = Requirement(lambda facts: flex_compiles(), "needs triton, which is not installed")
_VARLEN_SERVES = Requirement(lambda facts: varlen_knows(grouped=False), "is not in this torch")
_ONE_WIDTH = Requirement(
    lambda facts: facts.heads is not HeadKind.UNLIKE, "serves values as wide as keys only"
)
_NO_TENSOR = Requirement(
    lambda facts: facts.bias is not BiasKind.TENSOR, "adds no biases but those by distance"
)
_NO_SOFTCAP = Requirement(lambda facts: facts.bias is not BiasKind.SOFTCAP, "does not bound scores")

# (q, k, v, call) -> the result, and the log-sum-exp where it is computed
_Attend = Callable[[Tensor, Tensor, Tensor, AttentionCall], tuple[Tensor, Tensor | None]]

ATTENTION: Operator[_Attend] = Operator(
    "attention",
    (
        Implementation(
            "native_cpu",
            attention_native_cpu,
            on_native_cpu().needing(_NO_TENSOR, _NO_SOFTCAP, _ONE_WIDTH),
        ),
        Implementation(
            "flash_cpu",
            attention_flash_cpu,
            where(CPU, _FLASH_DTYPES, bias=BiasKind.NONE).needing(_ONE_WIDTH, _FLASH_PAYS),
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
                bias=BiasKind.NONE,
                heads=HeadKind.ALIKE,
            ).needing(_VARLEN_SERVES),
            traceable=True,
        ),
        Implementation(
            "cuda",
            attention_cuda,
            on_cuda_kernels(bias=BiasKind.NONE, heads=HeadKind.ALIKE).needing(_CUDA_PAYS, _IN_ORDER),
        ),
        Implementation(
            "flex",
            attention_flex,
            where(CUDA, TRAINING_FLOATS, dropout=False, lse=False, heads=HeadKind.ALIKE).needing(
                _NO_TENSOR, _FLEX_PAYS, _FLEX_SERVES
            ),
        ),
        Implementation(
            "cuda_by_mask",
            attention_cuda_by_mask,
            on_cuda_kernels(bias=BiasKind.NONE, heads=HeadKind.ALIKE).needing(_RESTRICTED),
        ),
        # On a GPU torch's kernels take heads of other widths, and hold as much.
        Implementation("planned", attention_planned, where(META, CUDA_DTYPES, bias=BiasKind.NONE)),
        Implementation(
            "sdpa",
            attention_sdpa,
            where(dropout=False, lse=False).needing(_NO_SOFTCAP),
            traceable=True,
        ),
        Implementation("composed", attention_with_dropout, where(lse=False)),
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
            bias=tuple(BiasKind),
            heads=tuple(HeadKind),
        )[1:],
    ),
    examples=attention_examples,
)


def chosen(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, *, lse: bool
) -> tuple[Implementation[_Attend], AttentionCall]:
    """The implementation that runs for a call, and the call as it takes it.

    Raises ValueError if the shapes do not fit together.
    """
    check(q, k, v, call)
    s, t = q.shape[0], k.shape[0]
    call = call.simplified(s, t)
    facts = AttentionFacts.of(
        q,
        mask=_mask_kind(call, s, t, q.shape[2] != k.shape[2]),
        dropout=call.dropout is not None,
        lse=lse,
        bias=_bias_kind(call.bias),
        heads=head_kind(q.shape[-1], v.shape[-1]),
    )
    implementation = ATTENTION.choose(facts)
    if holds_all_pairs(implementation.name, facts) and not torch.compiler.is_compiling():
        _warn_of_all_pairs(implementation.name, facts)
    return implementation, call


def holds_all_pairs(name: str, facts: AttentionFacts) -> bool:
    """Whether an implementation on a GPU materializes a tensor of all pairs of queries and keys."""
    masks = name == "sdpa" and (facts.bias is not BiasKind.NONE or _masked(facts))
    return facts.device == "cuda" and (masks or name in ("cuda_by_mask", "composed", "reference"))


def _warn_of_all_pairs(name: str, facts: AttentionFacts) -> None:
    """Warn, once for each reason."""
    reasons = dict(ATTENTION.passed_over(facts))
    warnings.warn(
        f"attention on the GPU runs as `{name}` (`cuda` {reasons['cuda']}), which holds a tensor of all "
        "pairs of queries and keys; see `megazero env` for the calls that need none.",
        stacklevel=5,
    )


def _bias_kind(bias: Bias | None) -> BiasKind:
    if bias is None:
        return BiasKind.NONE
    if isinstance(bias, Softcap):
        return BiasKind.SOFTCAP
    return BiasKind.SLOPES if isinstance(bias, Slopes) else BiasKind.TENSOR


def head_kind(size: int, values: int) -> HeadKind:
    """The kind of heads of so many channels, and so many of their values."""
    if values != size:
        return HeadKind.UNLIKE
    return HeadKind.WIDE if size > MOST_SIZE else HeadKind.ALIKE


def _mask_kind(call: AttentionCall, s: int, t: int, grouped: bool) -> MaskKind:
    """The kind of mask; causality of fewer queries than keys is a window too."""
    documents, pattern = call.documents, call.pattern
    if pattern.special:
        return MaskKind.PATTERN
    if call.part is not None:
        return MaskKind.PART
    if call.mask is not None:
        return MaskKind.DENSE
    square = s == t and pattern in (ALL, CAUSAL)
    if documents is not None:
        whole = documents.runs is not None and square
        return MaskKind.RUNS if whole and not (grouped and not varlen_knows(grouped)) else MaskKind.DOCUMENTS
    if pattern == ALL:
        return MaskKind.NONE
    return MaskKind.CAUSAL if square else MaskKind.WINDOW


def check(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> None:
    """Raise ValueError if the shapes of a call do not fit together."""
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
        own = call.part is not None and call.part.query_ids is not None
        if given != [b, t] or (s > t and not own):
            raise ValueError(
                f"`document_ids` must be [{b}, {t}] for at most as many queries, but is {given} for {s}; "
                "give each key the id of its document."
            )
    part = call.part
    if call.documents is not None and call.pattern.sinks and part is not None and part.begins is None:
        raise ValueError(
            "`pattern` must have no sinks where `part` has a part of documents, because where those begin is "
            "not among its keys; give all keys."
        )
    if call.dropout is not None:
        call.dropout.check(q.shape[1], q.shape[0], k.shape[0])
    if call.pattern.layout is not None:
        _check_layout(call.pattern.layout, call.places(q.shape[0], k.shape[0]), q.shape[2])


def _check_layout(layout: BlockLayout, places: tuple[range, range], heads: int) -> None:
    own, rows, columns = layout.blocks.shape
    least, stop = min(x.start for x in places), max(x.stop for x in places)
    if own not in (1, heads) or rows != columns or least < 0 or stop > rows * layout.size:
        raise ValueError(
            f"`layout` must be [1 or {heads}, N, N] with {stop} places or more in blocks of {layout.size}, "
            f"but is {list(layout.blocks.shape)}; make it for the length of the sequence."
        )
