"""Law 6: every implementation in every table equals its reference, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Container

import pytest
import torch
from torch import Tensor

from megazero.ops import operators
from megazero.ops.dispatch import Implementation
from tests.ops.cases import Case, all_cases
from tests.tables import check_all, over_table

CASES = all_cases()
TABLES = {operator.name: operator for operator in operators()}
UPDATES = {"gradient_sum", "lamb_move", "lamb_norms", "update"}
CODES = {"quantize", "dequantize", "kept_columns", "sort_by_expert", "to_fp8"}
SUMS = {"square_sum"}
LOSSES = {"cross_entropy", "kl_divergence", "linear_cross_entropy"}
# Of the largest magnitude of the truth, or of 0.1 where terms of order one cancel: a few roundings.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
DTYPES = tuple(TOLERANCE)
MANY = 60


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return request.config.option.device


def _members(case: Case, device: str) -> list[tuple[Implementation, torch.dtype]]:
    implementations = case.operator.implementations
    pairs = itertools.product(implementations, DTYPES)
    return [(each, dtype) for each, dtype in pairs if each.serves(case.facts(dtype, device))]


def _forward_backward(
    case: Case, fn, dtype: torch.dtype, inputs: tuple[Tensor, ...], device: str = "cpu"
) -> list[Tensor]:
    """The result and the gradients, on the CPU."""
    leaves = [each.to(device, dtype, copy=True).requires_grad_() for each in inputs]
    if not case.operator.differentiable:
        return [case.call(fn, *(each.detach() for each in leaves)).cpu()]
    out = case.call(fn, *leaves)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    grads = torch.autograd.grad(out, leaves, grad.bfloat16().to(device, out.dtype))
    return [each.cpu() for each in (out.detach(), *grads)]


@over_table("operator", sorted(TABLES))
def test_every_operator_is_swept(operator: str) -> None:
    assert operator in BY_OPERATOR.keys() | UPDATES | CODES | SUMS, (
        "updates are in place, codes are integers, sums are fp64: they have tests of their own"
    )


BY_OPERATOR: dict[str, list[Case]] = {}
for _case in CASES:
    BY_OPERATOR.setdefault(_case.operator.name, []).append(_case)
EVERY_OPERATOR = pytest.mark.parametrize("operator", BY_OPERATOR)


@pytest.mark.fast
@over_table("operator", BY_OPERATOR)
def test_equals_reference_in_its_first_case(operator: str, device: str) -> None:
    _check_equal(BY_OPERATOR[operator][0], device)


@EVERY_OPERATOR
def test_equals_reference(operator: str, device: str) -> None:
    """In each dtype against the reference in fp64 on a CPU, on the inputs as that dtype holds them.

    The cases of an operator that has many take the dtypes in turn.
    """
    first, *others = BY_OPERATOR[operator]
    rows = [(case, DTYPES) for case in others or [first]]
    if len(rows) > MANY:
        rows = [(case, (DTYPES[(i + i // len(DTYPES)) % len(DTYPES)],)) for i, (case, _) in enumerate(rows)]
    check_all(((str(row[0]), row) for row in rows), lambda row: _check_equal(row[0], device, row[1]))


@pytest.mark.slow
@pytest.mark.parametrize("operator", [name for name, cases in BY_OPERATOR.items() if len(cases) > MANY])
def test_equals_reference_in_every_dtype(operator: str, device: str) -> None:
    check_all(((str(case), case) for case in BY_OPERATOR[operator]), lambda case: _check_equal(case, device))


def _check_equal(case: Case, device: str, dtypes: Container[torch.dtype] = DTYPES) -> None:
    for implementation, dtype in _members(case, device):
        if dtype not in dtypes:
            continue
        inputs = tuple(each.to(dtype).double() for each in case.inputs)
        truth = _forward_backward(case, case.operator.reference, torch.float64, inputs)
        got = _forward_backward(case, implementation.fn, dtype, inputs, device)
        for which, (ours, true) in enumerate(zip(got, truth, strict=True)):
            where = f"{implementation.name} {dtype} {'result' if which == 0 else f'gradient {which - 1}'}"
            assert ours.shape == true.shape, where
            assert bool(ours.isfinite().all()), where
            if true.numel():
                error = (ours.double() - true).abs().max().item()
                bound = case.example.slack * TOLERANCE[dtype] * max(0.1, true.abs().max().item())
                assert error <= bound, where


@pytest.mark.parametrize("operator", sorted({case.operator.name for case in CASES if case.gradcheck}))
def test_gradcheck(operator: str) -> None:
    """The gradient is the derivative of the result, in fp64 by finite differences."""
    cases = ((str(case), case) for case in BY_OPERATOR[operator] if case.gradcheck)
    check_all(cases, _check_gradients)


def _check_gradients(case: Case) -> None:
    for implementation, dtype in _members(case, "cpu"):
        if dtype == torch.float64:
            leaves = [each.clone().requires_grad_() for each in case.inputs]
            bound = lambda *inputs, fn=implementation.fn: case.call(fn, *inputs)  # noqa: E731
            assert torch.autograd.gradcheck(bound, leaves, fast_mode=True), implementation.name


@EVERY_OPERATOR
def test_results_keep_the_input_dtype(operator: str) -> None:
    """Losses are fp32; all else, and every gradient, has the dtype of what went in."""
    some = BY_OPERATOR[operator][:: 5 if len(BY_OPERATOR[operator]) > MANY else 1]
    check_all(((str(case), case) for case in some), _check_dtypes)


def _check_dtypes(case: Case) -> None:
    for implementation, dtype in _members(case, "cpu"):
        if dtype == torch.bfloat16:
            result, *grads = _forward_backward(case, implementation.fn, dtype, case.inputs)
            expected = torch.float32 if case.operator.name in LOSSES else dtype
            assert result.dtype == expected, implementation.name
            assert {each.dtype for each in grads} == ({dtype} if case.operator.differentiable else set()), (
                implementation.name
            )


@over_table("dtype", [torch.float32, torch.bfloat16], ids=str)
@over_table("name", sorted(set(TABLES) - UPDATES - CODES - SUMS))
def test_every_operator_traces_on_the_meta_device(name: str, dtype: torch.dtype) -> None:
    """Law 7: shapes and dtypes of forward and backward without any numbers."""
    case = BY_OPERATOR[name][0]
    given = [each.to(dtype) for each in case.inputs]
    leaves = [each.to("meta").requires_grad_(case.operator.differentiable) for each in given]
    out = case.call(TABLES[name].choose(case.facts(dtype, "meta")).fn, *leaves)
    truth = case.call(TABLES[name].choose(case.facts(dtype)).fn, *given)
    assert (out.shape, out.dtype, out.device.type) == (truth.shape, truth.dtype, "meta")
    if case.operator.differentiable:
        for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
            assert (grad.shape, grad.dtype, grad.device.type) == (leaf.shape, dtype, "meta")
