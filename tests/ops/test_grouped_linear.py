"""The grouped products are each other's gradients, and torch's own agree with the loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megazero.ops.grouped_linear import (
    GROUPED_LINEAR,
    GROUPED_OUTER,
    grouped_linear,
    grouped_linear_reference,
    grouped_outer,
    grouped_outer_reference,
)

SIZES = ((3, 0, 5, 1), (0, 4), (6, 0, 0), (7,), (1, 1, 1))


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_of_the_product_are_grouped_products(sizes):
    """Of y = x w_e^T: dx = dy w_e, and dw_e = dy_e^T x_e, by autograd through one product for each row."""
    rows, n, k = sum(sizes), 5, 3
    x, w = randn(1, rows, k).requires_grad_(), randn(2, len(sizes), n, k).requires_grad_()
    number = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    y = torch.stack([w[e] @ row for e, row in zip(number.tolist(), x, strict=True)])
    to = randn(3, rows, n)
    dx, dw = torch.autograd.grad(y, (x, w), to)
    assert torch.allclose(grouped_linear(x.detach(), w.detach(), sizes), y.detach())
    assert torch.allclose(grouped_linear(to, w.detach().transpose(1, 2), sizes), dx)
    assert torch.allclose(grouped_outer(to, x.detach(), sizes), dw)
    for e, size in enumerate(sizes):
        assert (dw[e].abs().max() == 0) == (size == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_torchs_grouped_product_is_the_loop(sizes, dtype):
    """Which CUDA devices use for bf16; on a CPU it can be called as well."""
    by_torch = [operator.implementations[0] for operator in (GROUPED_LINEAR, GROUPED_OUTER)]
    assert [each.name for each in by_torch] == ["torch"] * 2
    rows, n, k = sum(sizes), 16, 8
    x, w, to = (each.to(dtype) for each in (randn(1, rows, k), randn(2, len(sizes), n, k), randn(3, rows, n)))
    pairs = [
        (by_torch[0].fn(x, w, sizes), grouped_linear_reference(x, w, sizes)),
        (
            by_torch[0].fn(to, w.transpose(1, 2), sizes),
            grouped_linear_reference(to, w.transpose(1, 2), sizes),
        ),
        (by_torch[1].fn(to, x, sizes), grouped_outer_reference(to, x, sizes)),
    ]
    for found, expected in pairs:
        assert found.dtype == dtype
        assert torch.allclose(found.float(), expected.float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
        assert bool(found.isfinite().all())
