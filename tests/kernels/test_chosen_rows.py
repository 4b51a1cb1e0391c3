"""The choice of rows: copies, so each result is the reference's, bit for bit."""

import pytest
import torch

from megazero.ops.chosen_rows import chosen_rows_cuda, chosen_rows_reference
from tests.kernels.harness import DTYPES, WIDTHS, in_every_order, same_bits

SPECIAL = (torch.inf, -torch.inf, torch.nan, 65504.0, -0.0, 2.0**-149)


def choice(n, m, taken, seed=0):
    g = torch.Generator().manual_seed(seed)
    places, rows = torch.randperm(m, generator=g)[:taken], torch.randperm(n, generator=g)[:taken]
    numbers, inverse = torch.full((m,), -1), torch.full((n,), -1)
    numbers[places], inverse[rows] = rows, places
    return numbers, inverse


def values(rows, width, dtype, seed=0, start=0):
    """Rows, among them all kinds of numbers; `start` elements into their storage."""
    flat = torch.randn(rows * width + start, generator=torch.Generator().manual_seed(seed))
    flat[:: 1 + len(flat) // 7] = SPECIAL[seed % len(SPECIAL)]
    return flat.to(dtype)[start:].view(rows, width)


def check(source, numbers, inverse, otherwise):
    grad = values(len(numbers), source.shape[1], source.dtype, seed=3)

    def run(fn, **own):
        leaves = [None if x is None else x.detach().requires_grad_() for x in (source, otherwise)]
        out = fn(leaves[0], numbers, inverse, leaves[1], **own)
        out.backward(grad)
        return [out, *(x.grad for x in leaves if x is not None)]

    found = in_every_order(lambda kernels: run(chosen_rows_cuda, kernels=kernels))
    for ours, true in zip(found, run(chosen_rows_reference), strict=True):
        assert same_bits(ours, true.detach()) or ours.nan_to_num(7).equal(true.detach().nan_to_num(7))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width(dtype):
    for width in WIDTHS:
        n, m, taken = (5, 7, 3) if width < 300 else (1, 2, 1)
        otherwise = values(m, width, dtype, seed=1) if width % 3 else None
        check(values(n, width, dtype, seed=width), *choice(n, m, taken), otherwise)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "m", "taken"), [(0, 3, 0), (3, 0, 0), (70, 90, 60), (9, 9, 9), (1, 300, 1)])
def test_numbers_of_rows(n, m, taken, dtype):
    check(values(n, 8, dtype), *choice(n, m, taken), values(m, 8, dtype, seed=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_start_off_an_aligned_address_and_are_not_contiguous(dtype):
    check(values(5, 16, dtype, start=1), *choice(5, 6, 4), values(6, 16, dtype, start=3))
    check(values(5, 32, dtype)[:, ::2], *choice(5, 6, 4), values(16, 6, dtype).t())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_number_that_no_row_has_gives_nan_and_reads_nothing(dtype):
    source, numbers = torch.ones(3, 5, dtype=dtype), torch.tensor([2, 3, -1, 2**62])
    (out,) = in_every_order(
        lambda kernels: [chosen_rows_cuda(source, numbers, torch.tensor([-1, -1, 0]), None, kernels)]
    )
    assert out.isnan().all(1).tolist() == [False, True, False, True]
    assert out[0].tolist() == [1.0] * 5
    assert out[2].tolist() == [0.0] * 5
