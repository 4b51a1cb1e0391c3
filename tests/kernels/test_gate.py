"""The gate's kernels against the formulas in fp64."""

import torch

from megazero.ops.gate import Gating, gate_cuda, gate_reference
from megazero.ops.top_k import top_k_reference
from tests.kernels.harness import Bound, in_every_order, same_bits, watched
from tests.tables import over_table

EXPERTS = (1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 256, 511, 1024)


def check(logits, k, gating, with_weights=True, with_probabilities=True):
    chosen = top_k_reference(logits, k)
    g = torch.Generator().manual_seed(logits.shape[1])
    grad_weights, grad_probabilities = (torch.randn(*x.shape, generator=g) for x in (chosen, logits))

    def run(fn, logits, *own):
        logits = logits.detach().requires_grad_()
        weights, probabilities = fn(logits, chosen, gating, *own)
        total = 0.0
        if with_weights:
            total = total + (weights * grad_weights.to(weights)).sum()
        if with_probabilities:
            total = total + (probabilities * grad_probabilities.to(weights)).sum()
        total.backward()
        return weights.detach(), probabilities.detach(), logits.grad

    found = in_every_order(lambda kernels: run(gate_cuda, logits, kernels))
    exact = run(gate_reference, logits.double())
    # exp(x - max) is as exact as its argument, which rounding moves by up to half a unit of the spread.
    spread = 4 + logits.double().abs().max()
    assert Bound(spread).holds(found[0], exact[0])
    assert Bound(spread).holds(found[1], exact[1])
    assert Bound(4 * spread, grad_probabilities.abs().max() + grad_weights.abs().max()).holds(
        found[2], exact[2]
    )


@over_table("gating", Gating, ids=lambda each: each.value)
def test_every_number_of_experts(gating):
    for experts in EXPERTS:
        g = torch.Generator().manual_seed(experts)
        check(torch.randn(3, experts, generator=g), min(experts, 1 + experts % 8), gating)


@over_table("gating", Gating, ids=lambda each: each.value)
def test_saturated_logits_many_choices_and_missing_gradients(gating):
    g = torch.Generator().manual_seed(1)
    check(20 * torch.randn(9, 40, generator=g), 32, gating)
    check(torch.randn(40, 9, generator=g).t(), 2, gating, with_weights=False)
    check(torch.randn(361, generator=g)[1:].view(9, 40), 1, gating, with_probabilities=False)


@over_table("gating", Gating, ids=lambda each: each.value)
def test_infinities_nan_and_no_tokens(gating):
    logits = torch.tensor(
        [[torch.inf, 0, 1], [-torch.inf, 0, 1], [torch.nan, 0, 1], [-torch.inf] * 3, [3e38] * 3]
    )
    chosen = top_k_reference(logits, 2)
    found = in_every_order(lambda kernels: gate_cuda(logits, chosen, gating, kernels))
    for ours, true in zip(found, gate_reference(logits, chosen, gating), strict=True):
        assert torch.allclose(ours, true, rtol=1e-6, atol=0, equal_nan=True)
    weights, probabilities = gate_cuda(
        torch.zeros(0, 3), torch.zeros(0, 2, dtype=torch.int64), gating, watched()
    )
    assert (weights.shape, probabilities.shape) == ((0, 2), (0, 3))


def test_a_number_that_no_expert_has_weighs_nothing_and_reads_nothing():
    logits, chosen = torch.randn(2, 4), torch.tensor([[1, 0], [2, 3]])
    foreign = torch.tensor([[1, 2**40], [-5, 3]])
    for gating in (Gating.SOFTMAX_BEFORE, Gating.SIGMOID):
        weights, probabilities = in_every_order(
            lambda kernels, g=gating: gate_cuda(logits, foreign, g, kernels)
        )
        assert weights[[0, 1], [1, 0]].tolist() == [0.0, 0.0]
        assert same_bits(probabilities, gate_cuda(logits, chosen, gating, watched())[1])
