"""Vocab-parallel KL divergence over 1, 2 and 4 thread ranks, with padding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.mpu.solo_group import SoloGroup
from megazero.ops.cross_entropy import VocabularySlice
from megazero.ops.kl_divergence import KL_DIVERGENCE, vocab_parallel_kl_divergence
from tests.ops.ranks import on_ranks
from tests.tables import over_table


@over_table("implementation", KL_DIVERGENCE.implementations, ids=lambda each: each.name)
@over_table("tp", [1, 2, 4])
@over_table("vocab", [16, 13, 5, 1])
@over_table(("scale", "temperature"), [(1.0, 1.0), (1.0, 4.0), (300.0, 2.0)])
def test_slices_equal_the_whole(implementation, tp, vocab, scale, temperature):
    """Also where padding fills whole slices: a vocabulary of 5 or 1 over four slices of 4."""
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 5, 3, 16, dtype=torch.float64) * scale
    whole = student[..., :vocab].clone().requires_grad_()
    rows = F.log_softmax(whole / temperature, -1)
    true = F.kl_div(
        rows, F.log_softmax(teacher[..., :vocab] / temperature, -1), reduction="none", log_target=True
    ).sum(-1)
    weights = torch.arange(1, 16, dtype=torch.float64).view(5, 3) / 15
    (true_grad,) = torch.autograd.grad(true, whole, weights)
    width = 16 // tp

    def one(group) -> tuple[Tensor, Tensor]:
        mine = slice(group.rank * width, group.rank * width + width)
        own = student[..., mine].clone().requires_grad_()
        part = VocabularySlice(group, mine.start, vocab)
        found = implementation.fn(own, teacher[..., mine], part, temperature)
        (grad,) = torch.autograd.grad(found, own, weights)
        return found.detach(), grad

    results = on_ranks(tp, one)
    assert all(torch.equal(found, results[0][0]) for found, _ in results)
    assert torch.allclose(results[0][0], true, rtol=1e-10, atol=1e-10)
    grad = torch.cat([each for _, each in results], -1)
    assert torch.allclose(grad[..., :vocab], true_grad, rtol=1e-9, atol=1e-10)
    assert not grad[..., vocab:].any(), "padding gets no gradient"


def test_literal_numbers():
    """A coin that is fair to the teacher and falls one way in four to the student: ln(4/3) / 2."""
    student = torch.tensor([0.25, 0.75]).log().view(1, 1, 2)
    teacher = torch.zeros(1, 1, 2)
    found = vocab_parallel_kl_divergence(student, teacher, VocabularySlice(SoloGroup(), 0, 2))
    assert found.item() == pytest.approx(0.5 * torch.log(torch.tensor(4 / 3)).item(), rel=1e-6)
    assert vocab_parallel_kl_divergence(teacher, teacher, VocabularySlice(SoloGroup(), 0, 2)).item() == 0.0


def test_bf16_logits_give_an_fp32_divergence_and_a_bf16_gradient():
    student = torch.randn(4, 2, 32).bfloat16().requires_grad_()
    found = vocab_parallel_kl_divergence(
        student, torch.randn(4, 2, 32).bfloat16(), VocabularySlice(SoloGroup(), 0, 30)
    )
    found.sum().backward()
    assert (found.dtype, student.grad.dtype) == (torch.float32, torch.bfloat16)
