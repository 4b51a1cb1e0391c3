"""The gathered sum's kernels against the formula in fp64."""

import pytest
import torch

from megazero.ops.gathered_sum import gathered_sum_cuda, gathered_sum_reference
from tests.kernels.harness import DTYPES, WIDTHS, Bound, in_every_order

# A token's experts and the rows that these made: (n, k, m, choices with a row).
SHAPES = ((3, 2, 6, 6), (2, 1, 3, 1), (2, 5, 9, 7), (1, 9, 9, 9))


def places(n, k, m, kept, seed=0):
    g = torch.Generator().manual_seed(seed)
    at, numbers = torch.randperm(n * k, generator=g)[:kept], torch.randperm(m, generator=g)[:kept]
    slots, taken_by = torch.full((n * k,), m), torch.full((m,), -1)
    slots[at], taken_by[numbers] = numbers, at
    return slots.view(n, k), taken_by


def check(shape, width, dtype, weighted=True, start=0):
    n, k, m, kept = shape
    g = torch.Generator().manual_seed(width)
    slots, taken_by = places(*shape, seed=width)
    rows = torch.randn(m * width + start, generator=g).to(dtype)[start:].view(m, width)
    grad = torch.randn(n, width, generator=g).to(dtype)
    weights = torch.rand(n, k, generator=g) - 0.3 if weighted else None
    whole = kept == n * k == m

    def run(fn, rows, grad, weights, *own):
        rows = rows.detach().requires_grad_()
        weights = None if weights is None else weights.detach().requires_grad_()
        out = fn(rows, slots, taken_by, weights, whole, *own)
        out.backward(grad)
        return out.detach(), rows.grad, None if weights is None else weights.grad

    found = in_every_order(lambda kernels: run(gathered_sum_cuda, rows, grad, weights, kernels))
    wide = None if weights is None else weights.double()
    exact = run(gathered_sum_reference, rows.double(), grad.double(), wide)
    most = rows.double().abs().sum()  # of the terms of a sum or a product
    assert Bound(2, most).holds(found[0], exact[0])
    assert Bound(1).holds(found[1], exact[1])
    if weighted:
        assert Bound(4, most * grad.double().abs().sum()).holds(found[2], exact[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width(dtype):
    for width in WIDTHS:
        check(SHAPES[width % 4] if width < 300 else (1, 2, 3, 2), width, dtype, weighted=width % 5 != 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 2, 3, 0), (3, 1, 0, 0), (3, 2, 5, 0), (90, 2, 64, 64)])
def test_numbers_of_tokens_and_rows(shape, dtype):
    check(shape, 8, dtype)
    check(shape, 3, dtype, weighted=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_rows_and_rows_off_an_aligned_address(dtype):
    check((1, 2, 2, 2), 8200, dtype)
    check((1, 2, 2, 2), 16, dtype, start=1)


def test_a_missing_row_adds_nothing_to_infinities():
    """A slot without a row once could have been 0 times whatever lay there."""
    rows = torch.tensor([[torch.inf, torch.nan, 65504.0, -torch.inf]]).half()
    slots, taken_by = torch.tensor([[1, 0], [-7, 2**62]]), torch.tensor([1])
    weights = torch.full((2, 2), 2.0)
    (out,) = in_every_order(
        lambda kernels: [gathered_sum_cuda(rows, slots, taken_by, weights, False, kernels)]
    )
    assert out.isnan().tolist() == [[False, True, False, False], [False] * 4]
    assert out[0, [0, 2, 3]].tolist() == [torch.inf, torch.inf, -torch.inf]
    assert out[1].tolist() == [0.0] * 4
