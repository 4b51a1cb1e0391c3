"""Squared ReLU's kernels: slices and extreme numbers."""

import pytest
import torch

from tests.kernels.harness import DTYPES
from tests.kernels.sweep import by_kernels, check, squared_relu, with_inputs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_slice(dtype):
    (x,) = squared_relu(15, 16, dtype).inputs
    check(with_inputs(squared_relu(15, 16, dtype), x.view(3, 5, 16)[:, :, 0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_numbers(dtype):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, -65504.0, 3.0], dtype=dtype)
    trial = squared_relu(1, 6, dtype)
    y, grad_x = by_kernels(with_inputs(trial, x), [torch.ones_like(x)])
    assert torch.allclose(y, torch.tensor([torch.inf, 0, torch.nan, 0, 0, 9], dtype=dtype), equal_nan=True)
    assert torch.allclose(
        grad_x, torch.tensor([torch.inf, 0, torch.nan, 0, 0, 6], dtype=dtype), equal_nan=True
    )
    tiny, huge = torch.finfo(dtype).smallest_normal / 4, torch.finfo(dtype).max
    edges = torch.tensor([tiny, -tiny, huge, -huge], dtype=dtype)
    check(with_inputs(trial, edges), [torch.tensor([1, 1, 0.25, 1], dtype=dtype)])
