"""The embedding's kernels: forward copies, backward sums in the tokens' order."""

import pytest
import torch

from megazero.ops.embedding import SEGMENT, embedding_cuda, embedding_reference
from tests.kernels.harness import DTYPES, WIDTHS, Bound, in_every_order, same_bits


def check(tokens, rows, width, dtype, first=0, vocab_size=None, start=0):
    """A slice of a table of vocab_size rows, by the kernels and by the formula."""
    vocab_size = vocab_size or rows
    g = torch.Generator().manual_seed(width + rows)
    weight = torch.randn(rows * width + start, generator=g).to(dtype)[start:].view(rows, width)
    grad = torch.randn(*tokens.shape, width, generator=g).to(dtype)

    def run(fn, weight, grad, *own):
        weight = weight.detach().requires_grad_()
        out = fn(tokens, weight, first, vocab_size, *own)
        out.backward(grad)
        return out.detach(), weight.grad

    out, found = in_every_order(lambda kernels: run(embedding_cuda, weight, grad, kernels))
    exact_out, exact = run(embedding_reference, weight.double(), grad.double())
    assert same_bits(out, exact_out.to(dtype))
    magnitude = run(embedding_reference, weight.double(), grad.double().abs())[1]
    assert Bound(2, magnitude).holds(found, exact)


def tokens_of(count, vocab_size, seed=0):
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width(dtype):
    for width in WIDTHS:
        check(tokens_of(6 if width < 300 else 2, 3, seed=width), 3 if width < 300 else 2, width, dtype, 0, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("first", "rows", "vocab_size"), [(0, 8, 16), (8, 8, 16), (16, 8, 19), (24, 8, 19)])
def test_slices_of_a_table_and_their_padding(first, rows, vocab_size, dtype):
    check(tokens_of(40, vocab_size).view(8, 5).t(), rows, 8, dtype, first, vocab_size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 3 * SEGMENT + 5])
def test_frequent_tokens_are_added_up_in_segments(count, dtype):
    """Of one row, from both sides of a segment's ends; the rows around it have few tokens."""
    frequent = torch.full((count,), 2)
    check(torch.cat([frequent, tokens_of(7, 2)]), 4, 5, dtype)
    check(torch.cat([tokens_of(7, 5), frequent, frequent]), 5, 8, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_rows_no_tokens_and_rows_off_an_aligned_address(dtype):
    check(torch.tensor([1, 1, 0]), 2, 8200, dtype)
    check(torch.zeros(0, dtype=torch.int64), 3, 4, dtype)
    check(torch.tensor([1, 1, 0]), 2, 16, dtype, start=1)


def test_a_foreign_token_gives_nan_and_no_gradient():
    weight = torch.ones(4, 3).requires_grad_()
    tokens = torch.tensor([-1, 2, 3, 4, 2**62, -(2**63)])

    def run(kernels):
        weight.grad = None
        out = embedding_cuda(tokens, weight, 0, 3, kernels)
        out.backward(torch.ones_like(out))
        return out, weight.grad

    out, grad = in_every_order(run)
    assert out.isnan().all(1).tolist() == [True, False, True, True, True, True]
    assert grad.sum(1).tolist() == [0.0, 0.0, 3.0, 0.0]
