"""Cross-entropy's kernels, on one rank and over several: padding, overwriting, extreme logits."""

import pytest
import torch

from megazero.ops.cross_entropy import OneRank, VocabularySlice, vocab_parallel_cross_entropy_cuda
from tests.kernels.harness import DTYPES, Bound, in_every_order, same_bits, watched
from tests.kernels.sweep import check, cross_entropy
from tests.ops.ranks import on_ranks
from tests.tables import over_table


def inputs(rows, width, dtype, columns=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(rows, width, generator=g)).to(dtype)
    return logits, torch.randint(columns or width, (rows,), generator=g), torch.randn(rows, generator=g)


def by_kernels(logits, target, grad, columns, overwrite=False):
    def run(kernels):
        # What backward overwrites is a result, as a head's logits are, and no leaf.
        leaf = logits.clone().requires_grad_()
        own = leaf * 1
        loss = vocab_parallel_cross_entropy_cuda(
            own, target, VocabularySlice(OneRank(), 0, columns), overwrite, kernels
        ).loss
        kept = loss.detach().clone()
        (grad_logits,) = torch.autograd.grad(loss, own, grad)
        assert (grad_logits.data_ptr() == own.data_ptr()) == overwrite
        return kept, grad_logits

    return in_every_order(run)


@over_table("dtype", DTYPES, ids=str)
@over_table(("rows", "width", "columns"), [(2, 40, 33), (3, 40, 1), (1, 9000, 8999)])
def test_padding_and_rows_of_several_tiles(dtype, rows, width, columns):
    *_, grad_logits = check(cross_entropy(rows, width, dtype, columns))
    assert not grad_logits[:, columns:].any()


@pytest.mark.parametrize("overwrite", [False, True])
def test_no_tokens(overwrite):
    library = watched()
    logits, target, grad = inputs(0, 8, torch.float32)
    own = logits.requires_grad_() * 1
    loss = vocab_parallel_cross_entropy_cuda(
        own, target, VocabularySlice(OneRank(), 0, 8), overwrite, library
    ).loss
    loss.backward(grad)
    assert (loss.shape, logits.grad.shape) == ((0,), (0, 8))
    assert not library.report().kernels


def test_a_vocabulary_of_131072():
    check(cross_entropy(1, 131072, torch.bfloat16))


@over_table("dtype", DTYPES, ids=str)
@over_table("width", [8, 37])
def test_the_gradient_over_the_logits_is_the_same(dtype, width):
    given = inputs(3, width, dtype)
    apart, over = (by_kernels(*given, width - 1, overwrite) for overwrite in (False, True))
    assert all(same_bits(a, b) for a, b in zip(apart, over, strict=True))


def test_extreme_logits():
    """One far above the others decides alone, -inf counts nothing, NaN and inf spoil their row only."""
    inf = torch.inf
    logits = torch.tensor(
        [[3e38, -3e38, 0, 1e-40], [-inf, 2, -inf, 2], [0, torch.nan, 1, 2], [0, inf, 1, 2], [1e-45, 0, 0, 0]]
    )
    target, grad = torch.tensor([0, 1, 0, 0, 3]), torch.ones(5)
    loss, grad_logits = by_kernels(logits, target, grad, 4)
    assert loss[[0, 1, 4]].tolist() == pytest.approx([0, 0.6931472, 1.3862944])
    assert loss[2:4].isnan().all()
    assert grad_logits[2:4].isnan().any(1).all()
    assert grad_logits[0].tolist() == [0, 0, 0, 0]
    assert grad_logits[1].tolist() == pytest.approx([0, -0.5, 0, 0.5])


def test_a_base_that_is_no_multiple_of_16_bytes():
    logits, target, _ = inputs(2, 64, torch.bfloat16)
    moved = torch.cat([torch.zeros(1, dtype=logits.dtype), logits.flatten()])[1:].view(2, 64)
    plain, shifted = (
        vocab_parallel_cross_entropy_cuda(
            each, target, VocabularySlice(OneRank(), 0, 64), kernels=watched()
        ).loss
        for each in (logits, moved)
    )
    assert Bound(4).holds(shifted, plain.double())


@over_table("tp", [2, 4])
@over_table("vocab", [16, 5, 1])
def test_slices_equal_the_whole(tp, vocab):
    """Also where padding fills whole slices."""
    logits, target, grad = inputs(3, 16, torch.float32, vocab)
    whole = logits[:, :vocab].double().requires_grad_()
    true = torch.nn.functional.cross_entropy(whole, target, reduction="none")
    (true_grad,) = torch.autograd.grad(true, whole, grad.double())
    width = 16 // tp

    def one(group):
        own = logits[:, group.rank * width : (group.rank + 1) * width].clone().requires_grad_()
        start = group.rank * width
        loss = vocab_parallel_cross_entropy_cuda(
            own, target, VocabularySlice(group, start, vocab), kernels=watched()
        ).loss
        return loss.detach(), torch.autograd.grad(loss, own, grad)[0]

    results = on_ranks(tp, one)
    assert all(same_bits(loss, results[0][0]) for loss, _ in results)
    found = torch.cat([each for _, each in results], -1)
    assert Bound(8, 4.0).holds(results[0][0], true.detach())
    assert Bound(8, 4.0).holds(found[:, :vocab], true_grad)
    assert not found[:, vocab:].any()
