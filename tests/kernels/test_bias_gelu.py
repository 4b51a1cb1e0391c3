"""GELU's kernels, with and without a bias: what is special to them."""

import pytest
import torch

from tests.kernels.harness import DTYPES, same_bits
from tests.kernels.sweep import bias_gelu, by_kernels, check, gradients_for, with_inputs
from tests.tables import over_table


@over_table("exact", [False, True])
@over_table("dtype", DTYPES, ids=str)
def test_without_a_bias_rows_do_not_matter(dtype, exact):
    """An array may end within a pack, whatever its rows are."""
    for rows, width in ((1, 1), (3, 5), (7, 33), (1, 513), (5, 1031)):
        check(bias_gelu(rows, width, dtype, exact, biased=False, scale=20.0))


@over_table("dtype", DTYPES, ids=str)
@over_table(("rows", "width"), [(41, 24), (19, 333), (0, 8)])
def test_rows_that_groups_take_in_turns(rows, width, dtype):
    check(bias_gelu(rows, width, dtype))


@pytest.mark.parametrize(("dtype", "total"), [(torch.bfloat16, 2048.0), (torch.float32, 2049.0)])
def test_a_bias_gradient_is_summed_in_fp32(dtype, total):
    """2,049 rows of a gradient of 1: a sum in bf16 would stop at 256."""
    x, bias, grad = torch.full((2049, 1), 30.0), torch.zeros(1), torch.ones(2049, 1)
    trial = with_inputs(bias_gelu(1, 1, dtype), x.to(dtype), bias.to(dtype))
    assert by_kernels(trial, [grad.to(dtype)])[2].tolist() == [total]


@over_table("exact", [False, True])
@over_table("dtype", DTYPES, ids=str)
def test_extreme_numbers(dtype, exact):
    tiny = torch.finfo(dtype).smallest_normal / 4
    numbers = [torch.inf, torch.nan, 65504.0, -65504.0, tiny, -tiny, 0.0, 1e4, -1e4, 12.0]
    x = torch.tensor(numbers, dtype=dtype)
    trial = with_inputs(bias_gelu(1, 1, dtype, exact, biased=False), x)
    y, slope = by_kernels(trial, [torch.ones_like(x)])
    halved = x[4:6] / 2
    expected = torch.tensor([torch.inf, torch.nan, x[2], 0, *halved, 0, x[7], 0, 12], dtype=dtype)
    assert torch.equal(y.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
    steps = torch.tensor([1, torch.nan, 1, 0, 0.5, 0.5, 0.5, 1, 0, 1], dtype=dtype)
    assert torch.equal(slope.nan_to_num(nan=-1.0), steps.nan_to_num(nan=-1.0))


def test_both_forms_differ():
    trials = [bias_gelu(2, 16, torch.float32, exact) for exact in (False, True)]
    tanh, erf = (by_kernels(trial, gradients_for(trials[0])) for trial in trials)
    assert not any(same_bits(one, other) for one, other in zip(tanh, erf, strict=True))
