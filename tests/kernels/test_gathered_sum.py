"""The gathered sum's kernels: numbers of rows, wide ones, and rows that are missing."""

import torch

from megazero.ops.gathered_sum import gathered_sum_cuda
from tests.kernels.harness import DTYPES, in_every_order
from tests.kernels.sweep import check, gathered_sum
from tests.tables import over_table


@over_table("dtype", DTYPES, ids=str)
@over_table("shape", [(0, 2, 3, 0), (3, 1, 0, 0), (3, 2, 5, 0), (90, 2, 64, 64)])
def test_numbers_of_tokens_and_rows(shape, dtype):
    check(gathered_sum(shape, 8, dtype))
    check(gathered_sum(shape, 3, dtype, weighted=False))


@over_table("dtype", DTYPES, ids=str)
def test_wide_rows(dtype):
    check(gathered_sum((1, 2, 2, 2), 8200, dtype))


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
