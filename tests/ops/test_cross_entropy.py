"""Vocab-parallel cross-entropy over 1, 2 and 4 thread ranks, padding, and bad targets."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.mpu.solo_group import SoloGroup
from megazero.ops import operators
from megazero.ops.cross_entropy import CROSS_ENTROPY, VocabularySlice
from megazero.ops.dispatch import CallFacts
from tests.ops.ranks import Rank, on_ranks
from tests.tables import over_table


def _sliced_loss(
    logits: Tensor, target: Tensor, vocab: int, tp: int, implementation
) -> tuple[Tensor, Tensor]:
    """Loss, checked equal on all ranks, and the gradient of its weighted sum, gathered."""
    width = logits.shape[-1] // tp
    weights = torch.arange(1, target.numel() + 1).view(target.shape) / target.numel()

    def one(group: Rank) -> tuple[Tensor, Tensor]:
        start = group.rank * width
        own = logits[..., start : start + width].clone().requires_grad_()
        loss = implementation.fn(own, target, VocabularySlice(group, start, vocab)).loss
        (grad,) = torch.autograd.grad(loss, own, weights.to(loss.dtype))
        return loss.detach(), grad

    results = on_ranks(tp, one)
    assert all(torch.equal(loss, results[0][0]) for loss, _ in results)
    return results[0][0], torch.cat([grad for _, grad in results], -1)


@over_table("implementation", CROSS_ENTROPY.implementations, ids=lambda each: each.name)
@over_table("tp", [1, 2, 4])
@over_table("vocab", [16, 13, 5, 1])
@over_table("scale", [1.0, 1e3])
def test_slices_equal_the_whole(implementation, tp: int, vocab: int, scale: float) -> None:
    """Also where padding fills whole slices: a vocabulary of 5 or 1 over four slices of 4."""
    if not implementation.serves(CallFacts("cpu", torch.float32)):
        pytest.skip(f"{implementation.name} is not built")
    wide = implementation.serves(CallFacts("cpu", torch.float64))
    dtype, tolerance = (torch.float64, 1e-10) if wide else (torch.float32, 1e-5)
    torch.manual_seed(0)
    logits = torch.randn(5, 3, 16, dtype=dtype) * scale
    target = torch.randint(vocab, (5, 3))
    whole = logits[..., :vocab].double().requires_grad_()
    true = F.cross_entropy(whole.reshape(-1, vocab), target.view(-1), reduction="none").view(5, 3)
    weights = torch.arange(1, 16).view(5, 3) / 15
    (true_grad,) = torch.autograd.grad(true, whole, weights.double())

    loss, grad = _sliced_loss(logits, target, vocab, tp, implementation)

    assert torch.allclose(loss.double(), true, rtol=tolerance, atol=tolerance)
    assert torch.allclose(grad[..., :vocab].double(), true_grad, rtol=10 * tolerance, atol=tolerance)
    assert not grad[..., vocab:].any(), "padding gets no gradient"


@over_table("implementation", CROSS_ENTROPY.implementations, ids=lambda each: each.name)
@over_table("tp", [1, 2, 4])
@over_table("vocab", [16, 13, 1])
@over_table("shift", [-9.0])
def test_log_z_and_its_gradient_equal_the_whole(implementation, tp: int, vocab: int, shift: float) -> None:
    """Of loss + 0.3 log(Z)^2, also where the log is negative; and of either alone."""
    if not implementation.serves(CallFacts("cpu", torch.float32)):
        pytest.skip(f"{implementation.name} is not built")
    dtype = torch.float64 if implementation.serves(CallFacts("cpu", torch.float64)) else torch.float32
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    torch.manual_seed(0)
    logits, target = torch.randn(5, 3, 16, dtype=dtype) + shift, torch.randint(vocab, (5, 3))
    width = 16 // tp
    for of_loss, of_z in ((1.0, 0.3), (0.0, 1.0), (-2.0, 0.0)):
        whole = logits[..., :vocab].double().requires_grad_()
        log_z = torch.logsumexp(whole, -1)
        true = of_loss * (log_z - whole.gather(-1, target.unsqueeze(-1)).squeeze(-1)) + of_z * log_z.square()
        (true_grad,) = torch.autograd.grad(true.sum(), whole)

        def one(group: Rank, of_loss=of_loss, of_z=of_z) -> tuple[Tensor, Tensor]:
            own = logits[..., group.rank * width : (group.rank + 1) * width].clone().requires_grad_()
            part = VocabularySlice(group, group.rank * width, vocab)
            losses = implementation.fn(own * 1, target, part, True)
            both = [of_loss * losses.loss] * bool(of_loss) + [of_z * losses.log_z.square()] * bool(of_z)
            return sum(both).detach(), torch.autograd.grad(sum(both).sum(), own)[0]

        results = on_ranks(tp, one)
        grad = torch.cat([each for _, each in results], -1)
        assert torch.allclose(results[0][0].double(), true, rtol=tolerance, atol=tolerance)
        assert torch.allclose(grad[..., :vocab].double(), true_grad, rtol=10 * tolerance, atol=tolerance)
        assert not grad[..., vocab:].any()


def test_a_slice_of_minus_infinity_counts_nothing() -> None:
    logits = torch.randn(2, 1, 8)
    logits[..., 4:] = -torch.inf
    target = torch.tensor([[1], [3]])
    loss, grad = _sliced_loss(logits, target, 8, 2, CROSS_ENTROPY.implementations[0])
    true = F.cross_entropy(logits[..., :4].view(2, 4), target.view(-1), reduction="none").view(2, 1)
    assert torch.allclose(loss, true)
    assert not grad[..., 4:].any()


def test_bf16_logits_give_an_fp32_loss_and_a_bf16_gradient() -> None:
    logits = torch.randn(4, 2, 32).bfloat16()
    loss, grad = _sliced_loss(logits, torch.randint(32, (4, 2)), 32, 2, CROSS_ENTROPY.implementations[0])
    assert (loss.dtype, grad.dtype) == (torch.float32, torch.bfloat16)


@over_table("implementation", CROSS_ENTROPY.implementations, ids=lambda each: each.name)
@over_table("tp", [1, 2])
@over_table("bad", [13, 15, 16, -1, -100])
def test_a_foreign_target_is_nan_and_spoils_no_other_row(implementation, tp: int, bad: int) -> None:
    """Also the ids of padding: nothing may train on them unnoticed, and nothing waits for a look."""
    if not implementation.serves(CallFacts("cpu", torch.float32)):
        pytest.skip(f"{implementation.name} is not built")
    torch.manual_seed(0)
    logits, target = torch.randn(2, 3, 16), torch.ones(2, 3, dtype=torch.int64)
    loss, _ = _sliced_loss(logits, target, 13, tp, implementation)
    target[1, 2] = bad
    width = 16 // tp

    def one(group: Rank) -> tuple[Tensor, Tensor]:
        own = logits[..., group.rank * width : (group.rank + 1) * width].clone().requires_grad_()
        found = implementation.fn(own, target, VocabularySlice(group, group.rank * width, 13)).loss
        return found.detach(), torch.autograd.grad(found, own, torch.ones(2, 3))[0]

    results = on_ranks(tp, one)
    for found, found_grad in results:
        assert found.isnan().nonzero().tolist() == [[1, 2]]
        assert torch.equal(found.view(-1)[:5], loss.view(-1)[:5])
        assert found_grad[1, 2].isnan().any()
        assert found_grad.view(6, -1)[:5].isfinite().all()


@over_table("implementation", CROSS_ENTROPY.implementations[:-1], ids=lambda each: each.name)
@over_table("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_over_the_logits_is_the_same(implementation, dtype) -> None:
    """In their memory, bit for bit; whoever else reads them in backward is told so."""
    if not implementation.serves(CallFacts("cpu", dtype)):
        pytest.skip(f"{implementation.name} is not built")
    torch.manual_seed(0)
    given, target = torch.randn(5, 2, 16).to(dtype), torch.randint(13, (5, 2))
    weights = torch.randn(5, 1).expand(5, 2)  # once the kernel read its copy after it had been freed

    def one(overwrite: bool) -> tuple[Tensor, Tensor]:
        logits = given.clone().requires_grad_() * 1
        loss = implementation.fn(logits, target, VocabularySlice(SoloGroup(), 0, 13), overwrite).loss
        (grad,) = torch.autograd.grad(loss, logits, weights)
        return logits, grad

    apart, over = one(False), one(True)
    assert torch.equal(apart[1], over[1])
    assert over[1].data_ptr() == over[0].data_ptr()
    assert torch.equal(apart[0], given)

    logits = given.clone().requires_grad_() * 1
    loss = implementation.fn(logits, target, VocabularySlice(SoloGroup(), 0, 13), True).loss
    also = logits.square().sum()
    loss.sum().backward(retain_graph=True)
    for again in (also, loss.sum()):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            again.backward()


def test_it_is_listed() -> None:
    assert CROSS_ENTROPY in operators()
