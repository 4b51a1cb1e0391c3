"""Projection and loss by blocks: slices over ranks, bad targets, memory, and the kernels for GPUs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.mpu.solo_group import SoloGroup
from megazero.ops.cross_entropy import CHUNKED_PASSES, VocabularySlice
from megazero.ops.dispatch import CallFacts
from megazero.ops.linear_cross_entropy import (
    BLOCK,
    LINEAR_CROSS_ENTROPY,
    Projection,
    linear_cross_entropy_cuda,
)
from tests.kernels.harness import Bound, in_every_order, watched
from tests.ops.ranks import on_ranks
from tests.tables import over_table


def whole(vocab: int) -> VocabularySlice:
    """The vocabulary on one rank."""
    return VocabularySlice(SoloGroup(), 0, vocab)


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
        loss = fn(*leaves, target, VocabularySlice(group, start, vocab), block).loss
        return loss.detach(), *torch.autograd.grad(loss, leaves, weights.to(loss.dtype))

    results = on_ranks(tp, one)
    assert all(torch.equal(each[0], results[0][0]) for each in results)
    return results[0][0], sum(each[1] for each in results), torch.cat([each[2] for each in results])


@over_table("implementation", LINEAR_CROSS_ENTROPY.implementations, ids=lambda each: each.name)
@over_table("tp", [1, 2, 4])
@over_table(("vocab", "block"), [(16, 3), (13, 2), (5, 4), (1, 1), (13, 100)])
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


@over_table("bad", [13, 16, -1, -100])
def test_a_foreign_target_is_nan_and_spoils_no_other_loss(bad: int) -> None:
    x, weight, target, _ = inputs(13)
    target[1, 2] = bad
    fn = LINEAR_CROSS_ENTROPY.choose(CallFacts.of(x)).fn
    loss = fn(x, weight, target, whole(13), 4).loss
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
        fn(x, weight, torch.zeros(200, 1, dtype=torch.int64), whole(128), block).loss.sum().backward()
    assert seen.elements == logits


def chosen(dtype=torch.float64):
    return LINEAR_CROSS_ENTROPY.choose(CallFacts("cpu", dtype)).fn


@over_table("tiles", [1, 2, 4, 7, 15, 99])
@over_table("tp", [1, 2])
def test_tiles_equal_the_whole(tiles: int, tp: int) -> None:
    """15 tokens: also where the last tile is smaller than the others, and with more tiles than tokens."""
    given = inputs(13)
    found = on_slices(partial(chosen(), tiles=tiles), given, 13, tp, 3)
    for ours, true in zip(found, exactly(*given, 13), strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tiles", [1, 4])
def test_gradcheck(tiles: int) -> None:
    x, weight, target, _ = inputs(13)
    leaves = x.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda *w: chosen()(*w, target, whole(13), 5, tiles).loss, leaves)


@over_table("tiles", [1, 4])
@over_table("scale", [0.25, torch.rand(5, 3, dtype=torch.float64)], ids=["number", "by-token"])
def test_the_gradient_of_a_scaled_loss(tiles: int, scale) -> None:
    """Head and input alike: DeepSpeed 0.19.8 scales the input's gradient alone."""
    x, weight, target, weights = inputs(13)
    leaves = x.requires_grad_(), weight.requires_grad_()
    loss = (chosen()(*leaves, target, whole(13), 5, tiles).loss * scale * weights).sum()
    _, *true = exactly(x.detach(), weight.detach(), target, weights * scale, 13)
    for ours, other in zip(torch.autograd.grad(loss, leaves), true, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-10, atol=1e-10)


@over_table("counted", [range(0), range(14, 15), range(0, 4)])
def test_tiles_without_a_counted_token(counted: range) -> None:
    """All of them, all but the last, all but the first: there are no means of tiles, so none of nothing."""
    x, weight, target, weights = inputs(13)
    mask = torch.zeros(15, dtype=weights.dtype)
    mask[counted.start : counted.stop] = 1
    weights = weights * mask.view(5, 3)
    found = on_slices(partial(chosen(), tiles=4), (x, weight, target, weights), 13, 1, 5)
    for ours, true in zip(found, exactly(x, weight, target, weights, 13), strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-10, atol=1e-10)
    assert bool(found[2].any()) == bool(len(counted))


def test_many_tiles_round_as_one_does() -> None:
    """Gradients of the weight in bf16: those of 256 tiles are added up before they are rounded."""
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=g).bfloat16() for shape in ((256, 1, 8), (16, 8)))
    target, weights = torch.randint(16, (256, 1), generator=g), torch.ones(256, 1)
    true = exactly(x, weight, target, weights, 16)[2]
    given, errors = (x, weight, target, weights), []
    for tiles in (1, 256):
        fn = partial(chosen(torch.bfloat16), tiles=tiles)
        errors.append((on_slices(fn, given, 16, 1, 16)[2] - true).abs().max())
    assert errors[1] < 2 * errors[0]


def test_one_tile_of_logits_exists_at_a_time() -> None:
    x, weight = torch.randn(200, 1, 2, requires_grad=True), torch.randn(128, 2, requires_grad=True)
    target = torch.zeros(200, 1, dtype=torch.int64)
    with _Largest() as seen:
        chosen(torch.float32)(x, weight, target, whole(128), 64, 10).loss.sum().backward()
    assert seen.elements == 20 * 64


def test_without_a_number_tiles_stay_below_a_gibibyte() -> None:
    """So kernels that count elements in 32 bits never see more than they can, however long the sequence."""
    how = Projection(whole(128_256), BLOCK, 0, CHUNKED_PASSES)
    for tokens in (1, 32_768, 462_500, 2**24):
        tiles = how.tokens(tokens, 128_256)
        assert [t.start for t in tiles[1:]] == [t.stop for t in tiles[:-1]]
        assert tiles[-1].stop == tokens
        assert max(t.stop - t.start for t in tiles) * BLOCK * 4 <= 2**30
    assert len(how.tokens(32_768, 128_256)) == 1


@over_table("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@over_table("block", [16, 5])
def test_by_the_kernels_for_gpus(dtype, block: int) -> None:
    given = inputs(29, 32, dtype)
    x, weight, target, weights = given

    def run(kernels):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = linear_cross_entropy_cuda(*leaves, target, whole(29), block, kernels=kernels).loss
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
