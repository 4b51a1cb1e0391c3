"""The embedding's kernels: forward copies, backward sums in the tokens' order."""

import torch

from megazero.ops.embedding import SEGMENT, embedding_cuda
from tests.kernels.harness import DTYPES, in_every_order
from tests.kernels.sweep import check, embedding
from tests.tables import over_table


def tokens_of(count, vocab_size):
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(0))


@over_table("dtype", DTYPES, ids=str)
@over_table(("first", "rows", "vocab_size"), [(0, 8, 16), (8, 8, 16), (16, 8, 19), (24, 8, 19)])
def test_slices_of_a_table_and_their_padding(first, rows, vocab_size, dtype):
    check(embedding(rows, 8, dtype, tokens_of(40, vocab_size).view(8, 5).t(), first, vocab_size))


@over_table("dtype", DTYPES, ids=str)
@over_table("count", [0, 1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 3 * SEGMENT + 5])
def test_frequent_tokens_are_added_up_in_segments(count, dtype):
    """Of one row, from both sides of a segment's ends; the rows around it have few tokens."""
    frequent = torch.full((count,), 2)
    check(embedding(4, 5, dtype, torch.cat([frequent, tokens_of(7, 2)])))
    check(embedding(5, 8, dtype, torch.cat([tokens_of(7, 5), frequent, frequent])))


@over_table("dtype", DTYPES, ids=str)
def test_wide_rows_and_no_tokens(dtype):
    check(embedding(2, 8200, dtype, torch.tensor([1, 1, 0])))
    check(embedding(3, 4, dtype, torch.zeros(0, dtype=torch.int64)))


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
