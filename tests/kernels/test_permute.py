"""The rows that experts get of tokens: copies, bit for bit, and sums in the choices' order for backward."""

import pytest
import torch

from megazero.ops.permute import permute_cuda, permute_reference
from tests.kernels.harness import DTYPES, WIDTHS, Bound, in_every_order, same_bits
from tests.kernels.test_gathered_sum import SHAPES, places


def check(shape, width, dtype, start=0):
    """(tokens, choices of each, rows, choices with a row), at `start` elements into their storage."""
    n, k, m, kept = shape
    g = torch.Generator().manual_seed(width)
    slots, choice = places(*shape, seed=width)
    x = torch.randn(n * width + start, generator=g).to(dtype)[start:].view(n, width)
    grad = torch.randn(m, width, generator=g).to(dtype)
    whole = kept == n * k == m

    def run(fn, x, grad, *own):
        x = x.detach().requires_grad_()
        out = fn(x, slots, choice, whole, *own)
        out.backward(grad)
        return out.detach(), x.grad

    out, found = in_every_order(lambda kernels: run(permute_cuda, x, grad, kernels))
    exact_out, exact = run(permute_reference, x.double(), grad.double())
    assert same_bits(out, exact_out.to(dtype))
    assert Bound(2, grad.double().abs().sum()).holds(found, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width(dtype):
    for width in WIDTHS:
        check(SHAPES[width % 4] if width < 300 else (1, 2, 3, 2), width, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(0, 2, 3, 0), (3, 1, 0, 0), (3, 2, 5, 0), (90, 2, 64, 64), (70, 3, 210, 210)]
)
def test_numbers_of_tokens_and_rows(shape, dtype):
    check(shape, 8, dtype)
    check(shape, 3, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_off_an_aligned_address(dtype):
    check((3, 2, 6, 6), 16, dtype, start=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_pattern_is_copied(dtype):
    """Infinities, denormal numbers and every kind of NaN: nothing is computed with."""
    numbers = torch.int16 if dtype.itemsize == 2 else torch.int32
    special = [0x7C01, -0x8000, -1, 1, 0x7F81, -0x0080, 0x7BFF, 0x7FFF]
    if dtype.itemsize == 4:
        special = [each * 65536 + 1 for each in special]
    x = torch.tensor(special, dtype=numbers).view(1, 8).view(dtype)
    slots, choice = torch.tensor([[2, 0]]), torch.tensor([1, -1, 0])
    (out,) = in_every_order(lambda kernels: [permute_cuda(x, slots, choice, False, kernels)])
    assert out.view(numbers).tolist() == [special, [0] * 8, special]


def test_a_foreign_number_is_none():
    x, slots, choice = torch.ones(2, 4), torch.tensor([[1, -1], [2**62, -7]]), torch.tensor([-1, 0])
    (out,) = in_every_order(lambda kernels: [permute_cuda(x, slots, choice, False, kernels)])
    assert out.tolist() == [[0.0] * 4, [1.0] * 4]


def test_tokens_and_places_with_gaps_in_memory():
    x = torch.arange(24.0).view(3, 8)[:, ::2]
    slots = torch.tensor([[2, 9, 1], [0, 9, 3], [5, 9, 4]])[:, ::2]
    (out,) = in_every_order(
        lambda kernels: [permute_cuda(x, slots, torch.tensor([2, 1, 0, 3, 5, 4]), True, kernels)]
    )
    assert out.equal(x[[1, 0, 0, 1, 2, 2]])
