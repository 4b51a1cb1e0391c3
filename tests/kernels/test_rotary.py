"""Rotary's kernel against the formula in fp64: any heads, halves, strides and tables."""

import pytest
import torch

from megazero.ops.rotary import apply_rotary_cuda, apply_rotary_reference, rotary_table
from tests.kernels.harness import DTYPES, Bound, in_every_order, watched
from tests.tables import over_table


def tables(s, b, half, by_sample=False):
    positions = torch.arange(s * b).view(s, b) * 5 if by_sample else torch.arange(s) * 5
    return rotary_table(positions, 2 * half, 100.0)


def by_kernels(x, cos, sin, grad):
    def run(kernels):
        leaf = x.detach().requires_grad_()
        y = apply_rotary_cuda(leaf, cos, sin, kernels)
        return y, torch.autograd.grad(y, leaf, grad)[0]

    return in_every_order(run)


def check(x, cos, sin):
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    y, grad_x = by_kernels(x, cos, sin, grad)
    leaf = x.double().requires_grad_()
    exact = apply_rotary_reference(leaf, cos.double(), sin.double())
    exact.backward(grad.double())
    half = cos.shape[-1]
    for found, true, terms in ((y, exact.detach(), x), (grad_x, leaf.grad, grad)):
        pairs = terms[..., :half].double().abs() + terms[..., half : 2 * half].double().abs()
        floor = torch.cat((pairs, pairs, torch.zeros_like(terms[..., 2 * half :])), -1)
        tiny = 2.0**-23 / torch.finfo(x.dtype).eps
        assert Bound(1, 2 * tiny * floor).holds(found, true)
    assert torch.equal(y[..., 2 * half :], x[..., 2 * half :])
    assert torch.equal(grad_x[..., 2 * half :], grad[..., 2 * half :])


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width(dtype):
    """With all channels turned, with some, and with one pair."""
    for dim in (*range(2, 35), 63, 64, 65, 80, 96, 128, 129, 256, 257):
        for half in {dim // 2, max(1, dim // 4), 1} if dim < 40 else {dim // 2, dim // 4}:
            check(random(2, 1, 1 + dim % 3, dim, dtype=dtype), *tables(2, 1, half))


@over_table("by_sample", [False, True])
@over_table(("s", "b", "n", "d"), [(3, 2, 5, 16), (2, 3, 40, 64), (9, 1, 1, 8)])
def test_positions_samples_and_heads(by_sample, s, b, n, d):
    check(random(s, b, n, d, dtype=torch.bfloat16), *tables(s, b, d // 2, by_sample))


@over_table("width", [16, 7])
@over_table("dtype", DTYPES, ids=str)
def test_queries_and_keys_lie_between_others(width, dtype):
    """As attention splits them from one projection: neither is copied, and neither is touched beyond."""
    qkv = random(3, 2, 4, 5, width, dtype=dtype)
    query, key, _ = qkv.split((3, 1, 1), dim=3)
    for part in (key.squeeze(3), query[:, :, :, 0], key.squeeze(3).transpose(0, 1)):
        check(part, *tables(part.shape[0], part.shape[1], width // 2))


def test_channels_that_are_strided_and_a_shifted_base():
    check(random(2, 2, 8, 3).transpose(2, 3), *tables(2, 2, 4))
    check(random(1 + 2 * 2 * 8)[1:].view(2, 1, 2, 8), *tables(2, 1, 4))


@over_table("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8)])
@over_table("by_sample", [False, True])
def test_nothing_to_turn(shape, by_sample):
    """A table of no positions once could not be made."""
    library = watched()
    x = torch.zeros(shape, requires_grad=True)
    y = apply_rotary_cuda(x, *tables(shape[0], shape[1], 4, by_sample), library)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    assert not library.report().kernels


def test_extreme_values():
    x = torch.tensor([torch.inf, torch.nan, 65504, 1e-40, 1, 2, -65504, 0]).view(1, 1, 1, 8)
    cos, sin = tables(1, 1, 4)
    y, _ = by_kernels(x, cos + 0.5, sin + 0.5, x)
    exact = apply_rotary_reference(x.double(), cos.double() + 0.5, sin.double() + 0.5)
    assert Bound(2, 65504.0).holds(y, exact)
