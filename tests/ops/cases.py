"""For each operator, the calls on which every implementation must equal the reference.

Ragged sizes (odd, one, not a multiple of any vector), extreme values, masks that leave rows empty.
A case gives float inputs as fp64 tensors, to be cast; `call(fn, *inputs)` binds the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megazero.mpu import SoloGroup
from megazero.ops import CallFacts, operators
from megazero.ops.attention import AttentionCall, MaskKind
from megazero.ops.dropout import AttentionDropout, Dropout
from megazero.ops.gate import Gating
from megazero.ops.rotary import rotary_table


@dataclass(frozen=True)
class Case:
    operator: str
    label: str
    inputs: tuple[Tensor, ...]
    call: Callable[..., Tensor]
    gradcheck: bool = False
    # How much larger than usual the terms are that cancel: a saturated softmax has gradients near
    # zero made of terms of order one, and rounds its scores in proportion to their size.
    slack: float = 1.0
    # The operator's own facts of this call.
    own: dict[str, Any] = field(default_factory=dict)
    # Whether autograd goes through it; otherwise another operator is its backward.
    backward: bool = True

    def facts(self, dtype: torch.dtype, device: str = "cpu") -> CallFacts:
        """Of this call with inputs of `dtype`."""
        operator = next(each for each in operators() if each.name == self.operator)
        return type(operator.calls[0])(device, dtype, **self.own)

    def __str__(self) -> str:
        return f"{self.operator}: {self.label}"


def _randn(*shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) * 31 + len(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale


def norm_cases() -> list[Case]:
    cases = []
    shapes = ((3, 2, 5), (1, 1, 1), (131, 3, 67), (2, 0, 8))
    for shape in shapes:
        h = shape[-1]
        # One channel has no variance: of large numbers its result would be their rounding, magnified.
        for scale in (1.0, 1e4, 1e-4) if h > 1 else (1.0,):
            x, w, b = _randn(*shape, scale=scale), 1 + _randn(h), _randn(h)
            small = shape == (3, 2, 5) and scale == 1.0
            label = f"{shape} x {scale}"
            cases.append(Case("layer_norm", label, (x, w, b), lambda f, *a: f(*a, 1e-5), small))
            cases.append(Case("rms_norm", label, (x, w), lambda f, *a: f(*a, 1e-5), small))
            added = (x, x.roll(1, -1), w)
            cases.append(Case("add_layer_norm", label, (*added, b), _both, small))
            cases.append(Case("add_rms_norm", label, added, _both, small))
    return cases


def _both(f: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor) -> Tensor:
    """A norm of a sum, and the sum."""
    return torch.cat(f(*inputs, 1e-5), -1)


def activation_cases() -> list[Case]:
    cases = []
    for shape in ((3, 5), (1, 1), (257, 2, 33), (0, 4)):
        for scale in (1.0, 60.0):
            x, label = _randn(*shape, scale=scale), f"{shape} x {scale}"
            small = shape == (3, 5) and scale == 1.0
            for exact in (False, True):
                inputs = (x, _randn(shape[-1]))
                cases.append(
                    Case(
                        "bias_gelu",
                        f"{label} {exact=}",
                        inputs,
                        lambda f, *a, e=exact: f(*a, e),
                        small,
                        own={"exact": exact, "mixed": False},
                    )
                )
            plain = {"exact": False, "mixed": False}
            no_bias = lambda f, a: f(a, None, False)  # noqa: E731
            cases.append(Case("bias_gelu", f"{label} no bias", (x,), no_bias, small, own=plain))
            cases.append(Case("squared_relu", label, (x,), lambda f, a: f(a), small))
            pairs = _randn(*shape[:-1], 2, shape[-1], scale=scale)
            cases.append(Case("swiglu", label, (pairs,), lambda f, a: f(a), small))
    return cases


def dropout_add_cases() -> list[Case]:
    cases = []
    for s, b, h in ((3, 2, 5), (1, 1, 1), (211, 3, 129)):
        x, bias, residual = _randn(s, b, h), _randn(h), _randn(s, b, h)
        for p in (None, 0.0, 0.1, 0.9):
            dropout = None if p is None else Dropout(p, torch.arange(b) * 7 - 3, range(5, 5 + s))
            label, own = f"{(s, b, h)} {p=}", {"dropout": dropout is not None, "mixed": False}
            cases.append(
                Case(
                    "bias_dropout_add",
                    label,
                    (x, bias, residual),
                    lambda f, *a, d=dropout: f(*a, d),
                    (s, p) == (3, 0.1),
                    own=own,
                )
            )
            cases.append(
                Case(
                    "bias_dropout_add",
                    f"{label} no bias",
                    (x, residual),
                    lambda f, x, r, d=dropout: f(x, None, r, d),
                    own=own,
                )
            )
    return cases


def softmax_cases() -> list[Case]:
    cases = []
    for b, n, q, k in ((2, 3, 5, 5), (1, 2, 1, 7), (2, 1, 3, 8), (2, 1, 8, 3), (1, 2, 65, 65)):
        keep = _randn(b, 1, q, k) > -0.3
        keep[0, 0, q // 2] = False
        for scale in (0.125, 30.0):
            for causal in (False, True):
                for mask in (None, keep, torch.zeros(1, 1, q, k, dtype=torch.bool)):
                    label = (
                        f"{(b, n, q, k)} {scale=} {causal=} mask={None if mask is None else int(mask.sum())}"
                    )
                    cases.append(
                        Case(
                            "scaled_softmax",
                            label,
                            (_randn(b, n, q, k),),
                            lambda f, x, s=scale, c=causal, m=mask: f(x, s, c, m),
                            q == 5 and scale < 1,
                            8.0 if scale > 1 else 1.0,
                        )
                    )
    for q, k in ((6, 6), (2, 6), (67, 67)):
        ids = torch.tensor([[0, 1, 1, 1, 2, 2], [4, 4, -1, 4, 4, -1]]).repeat_interleave(k // 6 + 1, 1)[:, :k]
        for causal in (False, True):
            for mask in (None, _randn(2, 1, q, k) > -0.3):
                label = f"documents {(q, k)} {causal=} mask={mask is not None}"
                call = lambda f, x, c=causal, m=mask, i=ids: f(x, 0.5, c, m, document_ids=i)  # noqa: E731
                cases.append(Case("scaled_softmax", label, (_randn(2, 2, q, k),), call, k == 6))
    return cases


def rotary_cases() -> list[Case]:
    cases = []
    for s, b, n, d, dim in ((5, 2, 3, 8, 8), (3, 1, 1, 6, 4), (129, 2, 5, 34, 34), (1, 1, 1, 2, 2)):
        for positions in (torch.arange(s) + 1000, torch.arange(s * b).view(s, b) * 37):
            table = rotary_table(positions, dim, 10000.0)
            label = f"{(s, b, n, d)} {dim=} positions {tuple(positions.shape)}"
            cases.append(
                Case(
                    "rotary",
                    label,
                    (_randn(s, b, n, d),),
                    lambda f, x, t=table: f(
                        x, *(each.to(torch.promote_types(each.dtype, x.dtype)) for each in t)
                    ),
                    s <= 5,
                    own={"table": torch.float32},  # in fp64 no kernel runs, whatever the table's dtype
                )
            )
    return cases


def attention_cases() -> list[Case]:
    cases = []
    shapes = (
        (5, 5, 2, 4, 2, 3),
        (1, 9, 2, 2, 1, 8),
        (3, 7, 1, 2, 2, 4),
        (150, 150, 2, 4, 4, 16),
        (131, 140, 1, 3, 1, 10),
        (6, 3, 1, 2, 2, 4),
    )
    for s, t, b, n, g, d in shapes:
        keep = _randn(b, 1, s, t) > -0.3
        keep[0, 0, s // 2] = False
        for scale, causal in ((1.0, True), (1.0, False), (12.0, True)):
            inputs = (_randn(s, b, n, d, scale=scale), _randn(t, b, g, d), _randn(t + 0, b, g, d) + 1)
            for mask in (None, keep, torch.zeros(1, 1, s, t, dtype=torch.bool)):
                masked = None if mask is None else int(mask.sum())
                label = f"s={s} t={t} b={b} n={n} g={g} d={d} x {scale} {causal=} mask={masked}"
                small = s == 5 and scale == 1.0
                cases.append(_attention_case(label, inputs, mask, causal, None, small))
                dropout = AttentionDropout(0.2, torch.arange(b) + 11, range(s), range(t), head_offset=4)
                cases.append(_attention_case(f"{label} dropout", inputs, mask, causal, dropout, small))
    return cases


def _attention_case(label, inputs, mask, causal, dropout, small) -> Case:
    s, t, d = inputs[0].shape[0], inputs[1].shape[0], inputs[0].shape[-1]
    slack = (8.0 if " x 12" in label else 1.0) * (1.0 if dropout is None else 2.0)
    dense = mask is not None or (causal and s != t)
    kind = MaskKind.DENSE if dense else MaskKind.CAUSAL if causal else MaskKind.NONE
    own = {"mask": kind, "dropout": dropout is not None, "lse": False}
    call = lambda f, *a: f(*a, AttentionCall(d**-0.5, causal, mask, dropout=dropout))[0]  # noqa: E731
    return Case("attention", label, inputs, call, small, slack, own)


def cross_entropy_cases() -> list[Case]:
    cases = []
    for s, b, padded, vocab in ((3, 2, 8, 8), (5, 1, 11, 7), (1, 1, 1, 1), (67, 3, 1030, 1021)):
        target = torch.arange(s * b).view(s, b) * 3 % vocab
        target[-1, -1] = vocab - 1
        for scale in (1.0, 200.0):
            logits = _randn(s, b, padded, scale=scale)
            logits[..., vocab:] += 1e4
            label = f"{(s, b, padded)} {vocab=} x {scale}"
            cases.append(
                Case(
                    "cross_entropy",
                    label,
                    (logits,),
                    lambda f, x, t=target, v=vocab: f(x, t, SoloGroup(), 0, v),
                    s <= 5 and scale == 1.0,
                )
            )
    masked = _randn(3, 2, 8)
    masked[..., 5] = -torch.inf
    call = lambda f, x: f(x, torch.tensor([[0, 1], [2, 3], [4, 6]]), SoloGroup(), 0, 8)  # noqa: E731
    cases.append(Case("cross_entropy", "a column of -inf", (masked,), call))
    return cases


def projected_cases() -> list[Case]:
    """Blocks of one column, that divide the vocabulary or do not, that are all padding, and one for all."""
    cases = []
    for s, b, h, padded, vocab in ((3, 2, 5, 8, 8), (2, 1, 3, 16, 7), (1, 1, 1, 1, 1), (19, 3, 24, 250, 241)):
        target = torch.arange(s * b).view(s, b) * 3 % vocab
        target[-1, -1] = vocab - 1
        x, weight = _randn(s, b, h), _randn(padded, h, scale=h**-0.5)
        for block in (1, 4, 8192) if s < 5 else (100,):
            cases.append(
                Case(
                    "linear_cross_entropy",
                    f"{(s, b, h, padded)} {vocab=} {block=}",
                    (x, weight),
                    lambda f, *a, t=target, v=vocab, k=block: f(*a, t, SoloGroup(), 0, v, k),
                    s <= 5 and block == 4,
                )
            )
    return cases


def divergence_cases() -> list[Case]:
    cases = []
    for s, b, padded, vocab in ((3, 2, 8, 8), (5, 1, 11, 7), (1, 1, 1, 1), (67, 3, 1030, 1021)):
        for scale, temperature in ((1.0, 1.0), (1.0, 3.0), (200.0, 1.0)):
            logits = _randn(s, b, padded, scale=scale), _randn(s, b, padded).roll(1, -1) * scale
            for each in logits:
                each[..., vocab:] += 1e4
            label = f"{(s, b, padded)} {vocab=} x {scale} / {temperature}"
            cases.append(
                Case(
                    "kl_divergence",
                    label,
                    logits[:1],
                    lambda f, x, its=logits[1], v=vocab, t=temperature: f(x, its.to(x), SoloGroup(), 0, v, t),
                    s <= 5 and scale == 1.0,
                    slack=scale,
                )
            )
    return cases


def gathered_cases() -> list[Case]:
    """Every slot with a row; slots without one; rows without a slot; none at all."""
    cases = []
    for n, k, m, h in (
        (5, 2, 10, 8),
        (7, 3, 15, 5),
        (4, 2, 12, 67),
        (3, 1, 0, 4),
        (0, 2, 3, 4),
        (257, 2, 400, 33),
    ):
        generator = torch.Generator().manual_seed(n + m)
        kept = min(n * k, m) if (n, m) != (4, 12) else 5
        places = torch.randperm(n * k, generator=generator)[:kept]
        numbers = torch.randperm(m, generator=generator)[:kept]
        slots, choice = torch.full((n * k,), m), torch.full((m,), -1)
        slots[places], choice[numbers] = numbers, places
        whole = kept == m == n * k
        rows, weights = _randn(m, h), _randn(n, k)
        given = {"slots": slots.view(n, k), "choice": choice, "whole": whole}
        label = f"{(n, k)} of {(m, h)}"
        cases += [
            Case("gathered_sum", label, (rows, weights), _weighted(**given), n <= 7 and h < 60),
            Case("gathered_sum", f"{label} unweighted", (rows,), _unweighted(**given)),
            Case("permute", label, (_randn(n, h),), _permuted(**given), n <= 7 and h < 60),
        ]
    return cases


def _weighted(slots: Tensor, choice: Tensor, whole: bool) -> Callable[..., Tensor]:
    return lambda f, rows, weights: f(rows, slots, choice, weights, whole)


def _unweighted(slots: Tensor, choice: Tensor, whole: bool) -> Callable[..., Tensor]:
    return lambda f, rows: f(rows, slots, choice, None, whole)


def _permuted(slots: Tensor, choice: Tensor, whole: bool) -> Callable[..., Tensor]:
    return lambda f, x: f(x, slots, choice, whole)


def chosen_cases() -> list[Case]:
    """All rows chosen, none, some, from none, and rows of one channel."""
    cases = []
    for n, m, taken, h in (
        (5, 5, 5, 4),
        (7, 12, 3, 5),
        (12, 7, 7, 67),
        (0, 3, 0, 4),
        (3, 0, 0, 4),
        (301, 400, 257, 1),
    ):
        generator = torch.Generator().manual_seed(n + m)
        places = torch.randperm(m, generator=generator)[:taken]
        rows = torch.randperm(n, generator=generator)[:taken]
        numbers, inverse = torch.full((m,), -1), torch.full((n,), -1)
        numbers[places], inverse[rows] = rows, places
        source, otherwise = _randn(n, h), _randn(m, h)
        label, small = f"{taken} of {(n, h)} among {m}", n <= 7 and m <= 12
        call = lambda f, *a, x=numbers, i=inverse: f(a[0], x, i, a[1] if len(a) > 1 else None)  # noqa: E731
        cases += [
            Case("chosen_rows", label, (source, otherwise), call, small),
            Case("chosen_rows", f"{label}, zeros otherwise", (source,), call, small),
        ]
    return cases


def embedding_cases() -> list[Case]:
    """A whole table, one with padding, its slices, a rank of padding alone, and frequent tokens."""
    cases = []
    for shape, h, first, rows, vocab_size in (
        ((5, 3), 4, 0, 7, 7),
        ((6,), 5, 0, 8, 6),
        ((5, 2), 67, 4, 4, 11),
        ((5, 2), 3, 12, 4, 11),
        ((0, 2), 4, 0, 3, 3),
        ((300, 2), 1, 0, 2, 2),
    ):
        tokens = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(h))
        call = lambda f, w, t=tokens, a=first, v=vocab_size: f(t, w, a, v)  # noqa: E731
        label = f"{shape} of {vocab_size} from {first}"
        # Frequent tokens: a row's gradient is a sum of many terms that cancel.
        slack = 10.0 if len(tokens) > 100 else 1.0
        cases.append(Case("embedding", label, (_randn(rows, h),), call, len(tokens) < 100, slack))
    return cases


def router_cases() -> list[Case]:
    """One expert, some of many, all of them, more than a warp holds; even logits and saturated ones."""
    cases = []
    for n, experts, k in ((5, 4, 2), (1, 1, 1), (7, 65, 8), (0, 4, 2), (3, 33, 33), (3, 1030, 2)):
        for scale in (1.0, 6.0):
            logits = _randn(n, experts, scale=scale)
            label, small = f"{k} of {(n, experts)} x {scale}", experts <= 1024 and k <= 32
            call = lambda f, x, k=k: f(x, k).to(x.dtype)  # noqa: E731
            if experts <= 256:  # a bf16 number holds no others exactly
                cases.append(Case("top_k", label, (logits,), call, own={"small": small}, backward=False))
            chosen = logits.topk(k, dim=1).indices
            for gating in Gating:
                call = lambda f, x, c=chosen, g=gating: torch.cat(f(x, c, g), 1)  # noqa: E731
                its_label, plain = f"{label} {gating.value}", n <= 7 and scale == 1.0
                own = {"small": k <= 32}
                cases.append(Case("gate", its_label, (logits,), call, plain, slack=scale, own=own))
    return cases


def grouped_cases() -> list[Case]:
    """Groups of uneven sizes, empty ones first, last and among others, and one group of all rows."""
    cases = []
    for sizes in ((3, 1, 4), (0, 5, 0, 0, 2, 0), (7,), (0,), (0, 0, 0), (1,) * 9, (129, 0, 3)):
        for n, k in ((5, 3), (8, 16), (1, 1), (67, 40)):
            # Rows of an odd number of elements are whole multiples of 16 bytes in no dtype.
            own = {"aligned": n % 8 == 0 and k % 8 == 0}
            rows, label = sum(sizes), f"{sizes} {n=} {k=}"
            x, weight, grad = _randn(rows, k), _randn(len(sizes), n, k), _randn(rows, n)
            for transposed in (False, True):
                given = weight.transpose(1, 2).contiguous().transpose(1, 2) if transposed else weight
                cases.append(
                    Case(
                        "grouped_linear",
                        f"{label} {transposed=}",
                        (x, given),
                        lambda f, *a, s=sizes: f(*a, s),
                        own=own,
                        backward=False,
                    )
                )
            call = lambda f, *a, s=sizes: f(*a, s)  # noqa: E731
            cases.append(Case("grouped_outer", label, (grad, x), call, own=own, backward=False))
    return cases


def all_cases() -> list[Case]:
    families = (
        norm_cases,
        activation_cases,
        dropout_add_cases,
        softmax_cases,
        rotary_cases,
        attention_cases,
        cross_entropy_cases,
        projected_cases,
        divergence_cases,
        gathered_cases,
        chosen_cases,
        embedding_cases,
        router_cases,
        grouped_cases,
    )
    return [case for family in families for case in family()]


def meta_cases() -> list[Case]:
    """One plain call of each operator whose constants live on the meta device too."""
    keys = torch.arange(2, device="meta")
    dropout = Dropout(0.1, keys, range(4))
    attention_dropout = AttentionDropout(0.1, keys, range(4), range(4))
    table = rotary_table(torch.arange(4, device="meta"), 8, 1e4)
    target = torch.zeros(4, 2, dtype=torch.int64, device="meta")
    grouped, aligned, few = lambda f, *a: f(*a, (2, 0, 3)), {"aligned": True}, {"small": True}
    x, wide, heads = _randn(4, 2, 16), _randn(16), tuple(_randn(4, 2, n, 8) for n in (4, 2, 2))
    return [
        Case("add_layer_norm", "meta", (x, x, wide, wide), _both),
        Case("add_rms_norm", "meta", (x, x, wide), _both),
        Case("layer_norm", "meta", (x, wide, wide), lambda f, *a: f(*a, 1e-5)),
        Case("rms_norm", "meta", (x, wide), lambda f, *a: f(*a, 1e-5)),
        Case(
            "bias_gelu",
            "meta",
            (x, wide),
            lambda f, *a: f(*a, False),
            own={"exact": False, "mixed": False},
        ),
        Case("squared_relu", "meta", (x,), lambda f, a: f(a)),
        Case("swiglu", "meta", (x,), lambda f, a: f(a)),
        Case(
            "bias_dropout_add",
            "meta",
            (x, wide, x),
            lambda f, *a: f(*a, dropout),
            own={"dropout": True, "mixed": False},
        ),
        Case("scaled_softmax", "meta", (_randn(2, 4, 4, 4),), lambda f, a: f(a, 0.5, True, None)),
        Case("rotary", "meta", (heads[0],), lambda f, a: f(a, *table), own={"table": torch.float32}),
        _attention_case("meta", heads, None, True, None, False),
        _attention_case("meta dropout", heads, None, True, attention_dropout, False),
        Case("cross_entropy", "meta", (x,), lambda f, a: f(a, target, SoloGroup(), 0, 15)),
        Case(
            "linear_cross_entropy",
            "meta",
            (x, _randn(8, 16)),
            lambda f, *a: f(*a, target, SoloGroup(), 0, 7, 4),
        ),
        Case("kl_divergence", "meta", (x,), lambda f, a: f(a, a.detach(), SoloGroup(), 0, 15, 1.0)),
        Case(
            "gathered_sum",
            "meta",
            (_randn(4, 16), _randn(2, 2)),
            _weighted(torch.arange(4, device="meta").view(2, 2), torch.arange(4, device="meta"), True),
        ),
        Case(
            "permute",
            "meta",
            (_randn(2, 16),),
            _permuted(torch.arange(4, device="meta").view(2, 2), torch.arange(4, device="meta"), True),
        ),
        Case(
            "embedding",
            "meta",
            (_randn(7, 16),),
            lambda f, w: f(torch.zeros(4, 2, dtype=torch.int64, device="meta"), w, 7, 14),
        ),
        Case("top_k", "meta", (_randn(4, 16),), lambda f, x: f(x, 2).to(x.dtype), own=few, backward=False),
        Case(
            "gate",
            "meta",
            (_randn(4, 16),),
            lambda f, x: torch.cat(
                f(x, torch.zeros(4, 2, dtype=torch.int64, device="meta"), Gating.SIGMOID), 1
            ),
            own=few,
        ),
        Case(
            "chosen_rows",
            "meta",
            (_randn(4, 16), _randn(2, 16)),
            lambda f, *a: f(a[0], torch.arange(2, device="meta"), torch.arange(4, device="meta"), a[1]),
        ),
        Case(
            "grouped_linear", "meta", (_randn(5, 16), _randn(3, 8, 16)), grouped, own=aligned, backward=False
        ),
        Case("grouped_outer", "meta", (_randn(5, 8), _randn(5, 16)), grouped, own=aligned, backward=False),
    ]
