"""Projection and loss by blocks: slices over ranks, bad targets, memory, and the kernels for GPUs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.mpu.solo_group import SoloGroup
from megazero.ops.dispatch import CallFacts
from megazero.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY, linear_cross_entropy_cuda
from tests.kernels.harness import Bound, in_every_order, watched
from tests.ops.ranks import on_ranks


def inputs(vocab: int, padded: int = 16, dtype=torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 3, 4, generator=g), torch.randn(padded, 4, generator=g)
    target, weights = torch.randint(vocab, (5, 3), generator=g), torch.randn(5, 3, generator=g)
    return x.to(dtype), weight.to(dtype), target, weights


def exactly(x: Tensor, weight: Tensor, target: Tensor, weights: Tensor, vocab: int) -> tuple[Tensor, ...]:
    """Loss and gradients by torch's own operators in fp64."""
    x, weight = (each.double().requires_grad_() for each in (x, weight))
    logits = F.linear(x, weight)[..., :vocab]
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
    return loss.detach(), *torch.autograd.grad(loss, (x, weight), weights.double())


def on_slices(fn, given, vocab: int, tp: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, checked equal on all ranks, the sum of the parts of x's gradient, and the weight's gradient."""
    x, weight, target, weights = given
    rows = len(weight) // tp

    def one(group):
        start = group.rank * rows
        leaves = x.clone().requires_grad_(), weight[start : start + rows].clone().requires_grad_()
        loss = fn(*leaves, target, group, start, vocab, block)
        return loss.detach(), *torch.autograd.grad(loss, leaves, weights.to(loss.dtype))

    results = on_ranks(tp, one)
    assert all(torch.equal(each[0], results[0][0]) for each in results)
    return results[0][0], sum(each[1] for each in results), torch.cat([each[2] for each in results])


@pytest.mark.parametrize("implementation", LINEAR_CROSS_ENTROPY.implementations, ids=lambda each: each.name)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("vocab", "block"), [(16, 3), (13, 2), (5, 4), (1, 1), (13, 100)])
def test_slices_and_blocks_equal_the_whole(implementation, tp: int, vocab: int, block: int) -> None:
    """Also where padding fills whole slices and blocks."""
    if not implementation.serves(CallFacts("cpu", torch.float32)):
        pytest.skip(f"{implementation.name} is not built")
    wide = implementation.serves(CallFacts("cpu", torch.float64))
    dtype, tolerance = (torch.float64, 1e-10) if wide else (torch.float32, 1e-5)
    given = inputs(vocab, dtype=dtype)
    found = on_slices(implementation.fn, given, vocab, tp, block)
    for ours, true in zip(found, exactly(*given, vocab), strict=True):
        assert torch.allclose(ours.double(), true, rtol=tolerance, atol=tolerance)
    assert not found[2][vocab:].any(), "padding gets no gradient"


@pytest.mark.parametrize("bad", [13, 16, -1, -100])
def test_a_foreign_target_is_nan_and_spoils_no_other_loss(bad: int) -> None:
    x, weight, target, _ = inputs(13)
    target[1, 2] = bad
    fn = LINEAR_CROSS_ENTROPY.choose(CallFacts.of(x)).fn
    loss = fn(x, weight, target, SoloGroup(), 0, 13, 4)
    assert loss.isnan().nonzero().tolist() == [[1, 2]]


class _Largest(TorchDispatchMode):
    """The most elements that any operator's result has had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize(("block", "logits"), [(8, 200 * 8), (16, 200 * 16)])
def test_the_logits_are_never_whole(block: int, logits: int) -> None:
    """200 tokens of width 2 and 128 ids: nothing is larger than a block of the logits."""
    x, weight = torch.randn(200, 1, 2, requires_grad=True), torch.randn(128, 2, requires_grad=True)
    fn = LINEAR_CROSS_ENTROPY.choose(CallFacts.of(x)).fn
    with _Largest() as seen:
        fn(x, weight, torch.zeros(200, 1, dtype=torch.int64), SoloGroup(), 0, 128, block).sum().backward()
    assert seen.elements == logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [16, 5])
def test_by_the_kernels_for_gpus(dtype, block: int) -> None:
    given = inputs(29, 32, dtype)
    x, weight, target, weights = given

    def run(kernels):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = linear_cross_entropy_cuda(*leaves, target, SoloGroup(), 0, 29, block, kernels=kernels)
        return loss, *torch.autograd.grad(loss, leaves, weights)

    found, true = in_every_order(run), exactly(*given, 29)
    # Logits are rounded to x's dtype, so the loss is no more precise than they are.
    precision = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    assert Bound(8 * precision, 8.0).holds(found[0], true[0])
    # Sums over 29 ids and 15 tokens of numbers below 4 times 4.
    assert all(Bound(4, 16.0).holds(a, b) for a, b in zip(found[1:], true[1:], strict=True))


def test_by_the_kernels_for_gpus_over_ranks() -> None:
    given, library = inputs(13, dtype=torch.float32), watched()
    found = on_slices(partial(linear_cross_entropy_cuda, kernels=library), given, 13, 2, 3)
    assert all(Bound(16, 8.0).holds(a, b) for a, b in zip(found, exactly(*given, 13), strict=True))
    assert library.report().faults == ()
