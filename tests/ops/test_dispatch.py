"""The table: first match wins, the reference is last, and what runs where can be asked and is true."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from megazero.mpu.solo_group import SoloGroup
from megazero.ops import native, operators
from megazero.ops.attention import (
    ATTENTION,
    BiasKind,
    HeadKind,
    MaskKind,
    Slopes,
    Softcap,
    attention,
)
from megazero.ops.attention.kernel import AttentionKernel
from megazero.ops.attention.varlen import varlen_knows
from megazero.ops.bias_dropout_add import bias_dropout_add
from megazero.ops.bias_gelu import bias_gelu
from megazero.ops.chosen_rows import chosen_rows
from megazero.ops.coded_linear import CodedWeight, coded_linear
from megazero.ops.cross_entropy import VocabularySlice, vocab_parallel_cross_entropy
from megazero.ops.dispatch import CallFacts, Implementation, Operator, explain, kinds_of_calls, where
from megazero.ops.dropout import AttentionDropout, Dropout
from megazero.ops.embedding import embedding
from megazero.ops.gate import Gating, gate
from megazero.ops.gated import GatedUnit, gated
from megazero.ops.gathered_sum import gathered_sum
from megazero.ops.gradient_sum import Summand, gradient_sum
from megazero.ops.grouped_linear import Groups, grouped_linear, grouped_outer
from megazero.ops.kept_columns import LONGEST, kept_columns
from megazero.ops.kl_divergence import vocab_parallel_kl_divergence
from megazero.ops.lamb import LambMoments, LambTerms, lamb_move, lamb_norms
from megazero.ops.layer_norm import add_layer_norm, layer_norm
from megazero.ops.linear_cross_entropy import linear_cross_entropy
from megazero.ops.permute import permute
from megazero.ops.quantize import Quantization, dequantize, quantize
from megazero.ops.rms_norm import add_rms_norm, rms_norm
from megazero.ops.rotary import apply_rotary, rotary_table
from megazero.ops.scaled_softmax import scaled_softmax
from megazero.ops.sort_by_expert import MOST_EXPERTS, sort_by_expert
from megazero.ops.square_sum import square_sum
from megazero.ops.squared_relu import squared_relu
from megazero.ops.swiglu import swiglu
from megazero.ops.to_fp8 import to_fp8
from megazero.ops.top_k import top_k
from megazero.ops.update import StepFacts, UpdateCall, update_step
from megazero.optim.elementwise import Adam, Sgd
from tests.ops.lse import attention_with_lse
from tests.tables import over_table


@dataclass(frozen=True)
class CakeFacts(CallFacts):
    """Of an operator for these tests."""

    layers: int
    iced: bool


CPU_FAST = Implementation("fast", lambda: "fast", where(frozenset({"cpu"}), frozenset({torch.float32})))
NOT_BUILT = Implementation("kernel", lambda: "kernel", where(built=lambda: False))
REFERENCE = Implementation("reference", lambda: "reference")
TABLE = Operator("op", (NOT_BUILT, CPU_FAST, REFERENCE))


def test_choose_takes_the_first_that_serves() -> None:
    assert TABLE.choose(CallFacts.of(torch.zeros(1))).name == "fast"
    assert TABLE.choose(CallFacts.of(torch.zeros(1, dtype=torch.float64))).name == "reference"
    assert TABLE.choose(CallFacts.of(torch.zeros(1, device="meta"))).name == "reference"


def test_explain_groups_dtypes_by_implementation() -> None:
    assert explain(TABLE) == (
        "op on cpu: reference (bfloat16, float16, float64), fast (float32)\n"
        "op on cuda: reference (bfloat16, float16, float32, float64)"
    )


def test_explain_names_the_facts_that_change_the_choice_and_no_others() -> None:
    iced = Implementation("iced", None, where(frozenset({"cpu"}), frozenset({torch.float16}), iced=True))
    calls = kinds_of_calls(CakeFacts, layers=(1, 2), iced=(False, True))
    assert len(calls) == 2 * 4 * 2 * 2
    assert explain(Operator("cake", (iced, REFERENCE), calls)) == (
        "cake on cpu, iced=False: reference (bfloat16, float16, float32, float64)\n"
        "cake on cpu, iced=True: reference (bfloat16, float32, float64), iced (float16)\n"
        "cake on cuda: reference (bfloat16, float16, float32, float64)"
    )


@pytest.mark.skipif(not native.available(), reason="the compiled kernels are not built")
def test_what_attention_says() -> None:
    """Kernels take no bias but slopes, nor values of another width. A bound of the scores is for few; on a
    GPU without a compiler nothing else that is done to scores changes the choice.
    """
    every = "(bfloat16, float16, float32, float64)"
    torch_rows = {
        "dropout=False, lse=False": "sdpa",
        "dropout=False, lse=True": "reference",
        "dropout=True, lse=False": "composed",
        "dropout=True, lse=True": "reference",
    }

    def bounding(row: str, bias: BiasKind) -> str:
        return "composed" if (row, bias) == ("sdpa", BiasKind.SOFTCAP) else row

    def on_cpu(facts: str, bias: BiasKind, heads: HeadKind) -> str:
        row, flash = bounding(torch_rows[facts], bias), facts != "dropout=False, lse=False"
        if bias is BiasKind.SOFTCAP or bias is BiasKind.TENSOR or heads is HeadKind.UNLIKE:
            choice = f"{row} {every}"
        elif bias is BiasKind.NONE and flash:
            choice = f"native_cpu (bfloat16, float32), {row} (float16), flash_cpu (float64)"
        else:
            choice = f"native_cpu (bfloat16, float32), {row} (float16, float64)"
        return f"attention on cpu, {facts}, bias={bias.value}, heads={heads.value}: {choice}"

    said = explain(ATTENTION).splitlines()
    assert {line for line in said if line.startswith("attention on cpu")} == {
        on_cpu(facts, bias, heads) for facts in torch_rows for bias in BiasKind for heads in HeadKind
    }
    runs = "attention on cuda, mask=runs, dropout=False, lse=False, bias=none"
    some = f"{runs}: varlen (bfloat16, float16), sdpa (float32, float64)"
    biased = (MaskKind.NONE, MaskKind.CAUSAL, MaskKind.DOCUMENTS, MaskKind.DENSE)
    on_cuda = (line for line in said if line.startswith("attention on cuda"))
    assert {line for line in on_cuda if runs not in line} == {
        f"attention on cuda, mask={mask.value}, {facts}, bias={bias.value}: {bounding(row, bias)} {every}"
        for mask in MaskKind
        for facts, row in torch_rows.items()
        for bias in (BiasKind if mask in biased else (BiasKind.NONE,))
        if (mask, row) != (MaskKind.RUNS, "sdpa")
    }
    assert [line for line in said if line.startswith(runs)] == (
        [some] if varlen_knows(grouped=False) else [f"{runs}: sdpa {every}"]
    )


def test_the_faster_ones_are_passed_over_for_a_reason() -> None:
    single, double = (CallFacts("cpu", dtype) for dtype in (torch.float32, torch.float64))
    assert TABLE.passed_over(single) == (("kernel", "is not built"),)
    assert TABLE.passed_over(double) == (("kernel", "is not built"), ("fast", "serves float32 only"))
    assert TABLE.passed_over(CallFacts("cuda", torch.float32))[1] == ("fast", "serves cpu only")
    iced = Implementation("iced", None, where(iced=True))
    assert iced.unmet(CakeFacts("cpu", torch.float32, 1, False)) == "serves iced=True only"
    plain = Implementation("plain", None, lambda facts: facts.device == "cpu")
    assert plain.unmet(CallFacts("cuda", torch.float32)) == "does not serve such calls"
    assert plain.unmet(single) is None


@over_table("operator", operators(), ids=lambda each: each.name)
def test_who_serves_has_no_reason_and_who_does_not_has_one(operator: Operator) -> None:
    for call in operator.calls:
        for each in operator.implementations:
            assert each.serves(call) == (each.unmet(call) is None)


def test_a_table_must_end_with_its_reference() -> None:
    with pytest.raises(AssertionError, match="the last implementation must be the reference"):
        Operator("op", (REFERENCE, CPU_FAST))
    with pytest.raises(AssertionError, match="the reference must handle every call"):
        Operator("op", (Implementation("reference", lambda: None, where(frozenset({"cpu"}))),))


def test_operators_are_named_once_each_in_order() -> None:
    names = [operator.name for operator in operators()]
    assert names == sorted(set(names))


def _randn(facts: CallFacts, *shape: int) -> Tensor:
    return torch.randn(*shape).to(facts.dtype).requires_grad_()


def _run_gelu(facts) -> Tensor:
    other = torch.float32 if facts.dtype == torch.float64 else torch.float64
    bias = torch.randn(8).to(other if facts.mixed else facts.dtype)
    return bias_gelu(_randn(facts, 3, 8), bias, facts.exact)


def _run_bias_dropout_add(facts) -> Tensor:
    other = torch.float32 if facts.dtype == torch.float64 else torch.float64
    return bias_dropout_add(
        _randn(facts, 3, 2, 8),
        _randn(facts, 8),
        torch.randn(3, 2, 8).to(other if facts.mixed else facts.dtype),
        Dropout(0.1, torch.arange(2), range(3)) if facts.dropout else None,
    )


def _run_attention(facts) -> Tensor:
    size = 136 if facts.heads is HeadKind.WIDE else 6
    q, k, v = (
        _randn(facts, 4, 2, *sizes)
        for sizes in ((2, size), (1, size), (1, 5 if facts.heads is HeadKind.UNLIKE else size))
    )
    front = attention_with_lse if facts.lse else attention
    slopes = Slopes(torch.tensor([0.5, 0.25]))
    biases = {BiasKind.NONE: None, BiasKind.SLOPES: slopes, BiasKind.TENSOR: _randn(facts, 2, 4, 4)}
    biases[BiasKind.SOFTCAP] = Softcap(2.0)
    out = front(
        q,
        k,
        v,
        causal=facts.mask is MaskKind.CAUSAL,
        mask=torch.ones(2, 1, 4, 4, dtype=torch.bool) if facts.mask is MaskKind.DENSE else None,
        document_ids=torch.zeros(2, 4, dtype=torch.int32) if facts.mask is MaskKind.DOCUMENTS else None,
        bias=biases[facts.bias],
        dropout=AttentionDropout(0.1, torch.arange(2), range(4), range(4)) if facts.dropout else None,
    )
    return out[0].sum() + out[1].sum() if facts.lse else out


def _run_update(facts) -> None:
    rule = Adam() if facts.rule == "adam" else Sgd(0.0)
    p, g, *states = ([torch.ones(3, dtype=facts.dtype)] for _ in range(2 + len(rule.state_names)))
    update_step(UpdateCall(rule, StepFacts(1, 0.1, 0.1), p, g, [[tensor for (tensor,) in states]], [None]))


def _groups(facts) -> Groups:
    return Groups.even(2, 3, torch.device("cpu")) if facts.even else Groups.of((2, 4), torch.device("cpu"))


def _run_grouped_linear(facts) -> None:
    width = 8 if facts.aligned else 3  # three elements are never a multiple of 16 bytes
    x, weight = torch.ones(6, width, dtype=facts.dtype), torch.ones(2, 16, width, dtype=facts.dtype)
    grouped_linear(x, weight, _groups(facts))


def _run_grouped_outer(facts) -> None:
    width = 8 if facts.aligned else 3
    x = torch.ones(6, 16, dtype=facts.dtype)
    grouped_outer(torch.ones(6, width, dtype=facts.dtype), x, _groups(facts))


def _run_lamb_norms(facts) -> None:
    four = ([torch.ones(3, dtype=facts.dtype)] for _ in range(4))
    lamb_norms(*four, [0.1], LambMoments(0.9, 0.9), LambTerms(1.0, 1e-3))


def _run_lamb_move(facts) -> None:
    three = ([torch.ones(3, dtype=facts.dtype)] for _ in range(3))
    lamb_move(*three, [torch.tensor(0.1)], [None], [0.1], LambTerms(1.0, 1e-3))


def _run_quantize(facts) -> None:
    quantize(torch.ones(2, 9, dtype=facts.dtype), Quantization("int8", 8))


def _run_dequantize(facts) -> None:
    how = Quantization("int8", 8)
    dequantize(torch.zeros(2, how.row_bytes(9), dtype=torch.uint8), 9, how, facts.dtype)


def _run_gradient_sum(facts) -> None:
    other = torch.float16 if facts.dtype == torch.bfloat16 else torch.bfloat16
    total = torch.zeros(3, dtype=facts.dtype if facts.known else other)
    gradient_sum([Summand(total, torch.ones(3, dtype=facts.dtype), begins=False)])
    assert total.tolist() == [1.0] * 3


def _run_coded_linear(facts) -> None:
    weight = CodedWeight.of(torch.ones(5, 8, dtype=torch.int8), torch.ones(5, 1), 8)
    coded_linear(torch.ones(3, 8, dtype=facts.dtype), weight, None)


def _run_square_sum(facts) -> None:
    square_sum([torch.ones(3, dtype=facts.dtype)])


def _run_to_fp8(facts) -> None:
    to_fp8(torch.ones(2, 3, dtype=facts.dtype), torch.ones(()), torch.float8_e4m3fn)


def _run_top_k(facts) -> None:
    top_k(_randn(facts, 3, 40 if facts.small else 1025), 2)


def _run_kept_columns(facts) -> None:
    kept_columns(torch.arange(2), 9 if facts.short else LONGEST + 1, 3)


def _run_sort_by_expert(facts) -> None:
    sort_by_expert(torch.tensor([[2, 0], [1, 2]]), None, 3 if facts.few else MOST_EXPERTS + 1)


# A call of the public function with these facts.
RUNS: dict[str, Callable] = {
    "add_layer_norm": lambda facts: sum(
        add_layer_norm(*(_randn(facts, *s) for s in ((3, 8), (3, 8), (8,), (8,))), 1e-5)
    ),
    "add_rms_norm": lambda facts: sum(
        add_rms_norm(*(_randn(facts, *s) for s in ((3, 8), (3, 8), (8,))), 1e-5)
    ),
    "attention": _run_attention,
    "bias_dropout_add": _run_bias_dropout_add,
    "bias_gelu": _run_gelu,
    "cross_entropy": lambda facts: vocab_parallel_cross_entropy(
        _randn(facts, 3, 2, 8), torch.ones(3, 2, dtype=torch.int64), VocabularySlice(SoloGroup(), 0, 8)
    ),
    "chosen_rows": lambda facts: chosen_rows(
        _randn(facts, 3, 8), torch.tensor([2, -1]), torch.tensor([-1, -1, 0]), _randn(facts, 2, 8)
    ),
    "dequantize": _run_dequantize,
    "embedding": lambda facts: embedding(torch.tensor([[1, 0, 1]]), _randn(facts, 3, 8), 0, 3),
    "gate": lambda facts: torch.cat(
        gate(_randn(facts, 3, 40), torch.arange(2 if facts.small else 33).expand(3, -1), Gating.SIGMOID), 1
    ),
    "coded_linear": _run_coded_linear,
    "gathered_sum": lambda facts: gathered_sum(
        _randn(facts, 4, 8), torch.arange(4).view(2, 2), torch.arange(4), _randn(facts, 2, 2)
    ),
    "gradient_sum": _run_gradient_sum,
    "grouped_linear": _run_grouped_linear,
    "grouped_outer": _run_grouped_outer,
    "kept_columns": _run_kept_columns,
    "kl_divergence": lambda facts: vocab_parallel_kl_divergence(
        _randn(facts, 3, 2, 8), _randn(facts, 3, 2, 8), VocabularySlice(SoloGroup(), 0, 8)
    ),
    "lamb_move": _run_lamb_move,
    "lamb_norms": _run_lamb_norms,
    "layer_norm": lambda facts: layer_norm(*(_randn(facts, *s) for s in ((3, 8), (8,), (8,))), 1e-5),
    "linear_cross_entropy": lambda facts: (
        linear_cross_entropy(
            _randn(facts, 3, 2, 4),
            _randn(facts, 8, 4),
            torch.ones(3, 2, dtype=torch.int64),
            VocabularySlice(SoloGroup(), 0, 8),
        ).loss
    ),
    "permute": lambda facts: permute(
        _randn(facts, 3, 8), torch.tensor([[1], [0], [2]]), torch.tensor([1, 0])
    ),
    "quantize": _run_quantize,
    "rms_norm": lambda facts: rms_norm(_randn(facts, 3, 8), _randn(facts, 8), 1e-5),
    "rotary": lambda facts: apply_rotary(
        _randn(facts, 3, 2, 2, 8), *rotary_table(torch.arange(3), 8, 1e4, facts.table)
    ),
    "scaled_softmax": lambda facts: scaled_softmax(_randn(facts, 2, 2, 4, 4), 0.5, True, None),
    "sort_by_expert": _run_sort_by_expert,
    "square_sum": _run_square_sum,
    "gated": lambda facts: gated(_randn(facts, 3, 2, 8), GatedUnit("geglu")),
    "squared_relu": lambda facts: squared_relu(_randn(facts, 3, 8)),
    "swiglu": lambda facts: swiglu(_randn(facts, 3, 2, 8)),
    "to_fp8": _run_to_fp8,
    "top_k": _run_top_k,
    "update": _run_update,
}


@contextmanager
def functions_called(wanted: set):
    """The code objects among `wanted` that Python entered within it, whoever called them."""
    found = set()

    def profile(frame, event, _) -> None:
        if event == "call" and frame.f_code in wanted:
            found.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(before)


def own_code(fn: object) -> set:
    """The code that an implementation alone runs: its function's, or that of the kernels which it binds."""
    if isinstance(fn, partial):
        return set().union(*map(own_code, fn.args))
    if isinstance(fn, AttentionKernel):
        return {type(fn).prepare.__code__}
    if dataclasses.is_dataclass(fn):
        return set().union(*(own_code(getattr(fn, field.name)) for field in dataclasses.fields(fn)))
    return {inspect.unwrap(fn).__code__}


@over_table("operator", operators(), ids=lambda each: each.name)
def test_what_is_said_to_run_is_what_runs(operator: Operator) -> None:
    """Forward and backward of every kind of call on CPU enter one implementation, the one that was named.

    bias_gelu's kernel once handed the erf form on to torch, and the kernel was said to run.
    """
    codes = {code: each.name for each in operator.implementations for code in own_code(each.fn)}
    calls = [call for call in operator.calls if call.device == "cpu"]
    # Keys and choices have one dtype.
    assert len(calls) >= (2 if operator.name in ("kept_columns", "sort_by_expert") else 4)
    for call in calls:
        with functions_called(set(codes)) as found:
            out = RUNS[operator.name](call)
            if out is not None:
                out.float().sum().backward()
        assert {codes[code] for code in found} == {operator.choose(call).name}, call
