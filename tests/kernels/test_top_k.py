"""The choice of the highest: the columns of a stable descending sort, bit for bit."""

import pytest
import torch

from megazero.ops.top_k import top_k_cuda, top_k_reference
from tests.kernels.harness import DTYPES, in_every_order, watched
from tests.tables import over_table

EXPERTS = (*range(1, 36), 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 1023, 1024)
SPECIAL = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, 0.0, -0.0, 2.0**-149, 65504.0])


def check(values, k):
    (chosen,) = in_every_order(lambda kernels: [top_k_cuda(values, k, kernels)])
    assert chosen.equal(top_k_reference(values, k)), (values.shape, k)


def few_values(rows, experts, dtype, seed):
    """Small integers, so that many are equal."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, (rows, experts), generator=g).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_experts(dtype):
    for experts in EXPERTS:
        g = torch.Generator().manual_seed(experts)
        check(torch.randn(3, experts, generator=g).to(dtype), min(experts, 8))
        check(few_values(2, experts, dtype, experts), min(experts, 32 if experts < 40 else 4))


@over_table("dtype", DTYPES, ids=str)
def test_infinities_nan_zeros_and_denormals(dtype):
    g = torch.Generator().manual_seed(0)
    picks = torch.randint(len(SPECIAL), (20, 37), generator=g)
    check(SPECIAL[picks].to(dtype), 32)
    check(torch.full((2, 5), -torch.inf, dtype=dtype), 5)
    check(torch.full((2, 40), torch.nan, dtype=dtype), 3)


@over_table("dtype", DTYPES, ids=str)
def test_rows_off_an_aligned_address_strided_ones_and_none(dtype):
    check(torch.randn(5 * 9 + 1).to(dtype)[1:].view(5, 9), 2)
    check(torch.randn(9, 5).to(dtype).t(), 2)
    assert top_k_cuda(torch.zeros(0, 4, dtype=dtype), 2, watched()).shape == (0, 2)
