"""Which experts a router chooses, and what they weigh: literal tables."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megazero.layers.placement import Placement
from megazero.moe import router as router_module
from megazero.moe.router import Noise, Router, router_weight
from megazero.moe.tokens import Tokens
from megazero.mpu.context import solo_context
from megazero.mpu.solo_group import SoloGroup
from megazero.spec.resolve import model_spec, router_spec
from tests.moe.samples import config, inputs, randn, route, tokens
from tests.tables import over_table

EIGHTH = [[0.0, math.log(2), math.log(4), math.log(8)]]  # probabilities 1, 2, 4 and 8 of 15


def logit(*probabilities: float) -> list[list[float]]:
    """The logits of these sigmoids, as one token's."""
    return [[math.log(p / (1 - p)) for p in probabilities]]


def close(found: torch.Tensor, *expected) -> bool:
    return torch.allclose(found, torch.tensor(expected), rtol=1e-5)


def test_of_equal_experts_the_lower_number_comes_first():
    table = [[1, 1, 1, 1], [0, 2, 2, 1], [3, 3, 0, 3], [-1, 0, 0, 0], [5, 1, 5, 5]]
    expected = [[0, 1, 2], [1, 2, 3], [0, 1, 3], [1, 2, 3], [0, 2, 3]]
    assert route(table, moe_router_topk=3).experts.tolist() == expected
    assert route(torch.zeros(3, 64), moe_router_topk=3).experts.tolist() == [[0, 1, 2]] * 3


def test_softmax_after_and_before_the_choice():
    after = route(EIGHTH, moe_router_topk=2)
    assert after.experts.tolist() == [[3, 2]]
    assert close(after.weights, [8 / 12, 4 / 12])
    before = route(EIGHTH, moe_router_topk=2, moe_router_pre_softmax=True)
    assert before.experts.tolist() == [[3, 2]]
    assert close(before.weights, [8 / 15, 4 / 15])
    one = route(EIGHTH, moe_router_topk=1, moe_router_pre_softmax=True)
    assert close(one.weights, [8 / 15])
    for found in (after, before, one):
        assert close(found.probabilities, [1 / 15, 2 / 15, 4 / 15, 8 / 15])
        assert close(found.logits, EIGHTH[0])


@over_table(
    ("k", "bias", "experts", "weights"),
    [
        (2, None, [2, 1], [0.8 / 1.3, 0.5 / 1.3]),
        (1, None, [2], [0.8]),
        # The bias makes 0.9 of 0.5, for the choice alone.
        (2, [0.0, 0.4, 0.0, 0.0], [1, 2], [0.5 / 1.3, 0.8 / 1.3]),
        (1, [0.0, 0.4, 0.0, 0.0], [1], [0.5]),
        (2, [0.0, 0.0, -0.75, 0.05], [1, 0], [0.5 / 0.7, 0.2 / 0.7]),
    ],
)
def test_sigmoid_scores(k, bias, experts, weights):
    found = route(
        logit(0.2, 0.5, 0.8, 0.1), bias=bias, moe_router_topk=k, moe_router_score_function="sigmoid"
    )
    assert found.experts.tolist() == [experts]
    assert close(found.weights, weights)
    assert close(found.probabilities, [0.2 / 1.6, 0.5 / 1.6, 0.8 / 1.6, 0.1 / 1.6])


GROUPED = logit(0.9, 0.1, 0.6, 0.5, 0.55, 0.56, 0.8, 0.05)  # pairs of 1.0, 1.1, 1.11 and 0.85


@over_table(
    ("k", "groups", "bias", "experts"),
    [
        (4, 2, None, [2, 5, 4, 3]),  # of the groups {4, 5} and {2, 3}
        (2, 1, None, [5, 4]),
        (2, 2, None, [0, 6]),  # by each group's best expert
        (1, 1, None, [0]),
        (3, 3, None, [0, 6, 2]),
        (2, 1, [0, 0, 0, 0, 0, 0, 0, 0.4], [6, 7]),  # 0.8 + 0.45
        (4, 4, None, [0, 6, 2, 5]),
    ],
)
def test_groups(k, groups, bias, experts):
    found = route(
        GROUPED,
        bias=bias,
        moe_router_topk=k,
        moe_router_num_groups=4,
        moe_router_group_topk=groups,
        moe_router_score_function="sigmoid",
    )
    assert found.experts.tolist() == [experts]
    scores = torch.tensor(GROUPED).sigmoid()[0, experts]
    assert close(found.weights[0], *(scores / (scores.sum() if k > 1 else 1)).tolist())


def test_of_equal_groups_the_lower_ones_come_first():
    table = [[0.0] * 8, [0, 0, 1, 0, 0, 1, 0, 0]]
    found = route(table, moe_router_topk=2, moe_router_num_groups=4, moe_router_group_topk=1)
    assert found.experts.tolist() == [[0, 1], [2, 3]]
    two = route(table, moe_router_topk=2, moe_router_num_groups=4, moe_router_group_topk=2)
    assert two.experts.tolist() == [[0, 1], [2, 5]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_scaling_factor_multiplies_the_weights_alone(score):
    settings = {"moe_router_topk": 2, "moe_router_score_function": score}
    plain, scaled = route(EIGHTH, **settings), route(EIGHTH, moe_router_topk_scaling_factor=2.5, **settings)
    assert torch.allclose(scaled.weights, 2.5 * plain.weights)
    assert torch.equal(scaled.probabilities, plain.probabilities)


def test_a_bias_that_is_negative_everywhere_chooses_inside_the_groups_all_the_same():
    """Zeros in place of the excluded experts, as some routers have them, would win over these."""
    found = route(
        GROUPED,
        bias=[-2.0] * 8,
        moe_router_topk=4,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_score_function="sigmoid",
    )
    assert found.experts.tolist() == [[2, 5, 4, 3]]


@over_table(
    "settings",
    [
        {},
        {"moe_router_pre_softmax": True},
        {"moe_router_score_function": "sigmoid"},
        {"moe_router_score_function": "sigmoid", "moe_router_topk": 1},
        {"moe_router_pre_softmax": True, "moe_router_topk": 1, "moe_router_topk_scaling_factor": 3.0},
    ],
    ids=str,
)
def test_gradients_of_the_weights_are_those_of_the_formula(settings):
    table = randn(1, 5, 4).float()
    leaf = table.clone().requires_grad_()
    found = route(leaf, **settings)
    to = randn(2, *found.weights.shape).float()
    (grad,) = torch.autograd.grad(found.weights, leaf, to)
    again = table.double().requires_grad_()
    mask = torch.zeros(5, 4, dtype=torch.float64).scatter(1, found.experts, 1.0)
    if settings.get("moe_router_score_function") == "sigmoid":
        scores = 1 / (1 + (-again).exp())
        if found.weights.shape[1] > 1:
            scores = scores / (scores * mask).sum(1, keepdim=True)
    else:
        shares = again.exp() * (1 if "moe_router_pre_softmax" in settings else mask)
        scores = shares / shares.sum(1, keepdim=True) * settings.get("moe_router_topk_scaling_factor", 1.0)
    (expected,) = torch.autograd.grad(scores.gather(1, found.experts), again, to.double())
    assert torch.allclose(grad.double(), expected, atol=1e-6)
    assert grad.abs().max() > 1e-2


def test_logits_are_a_product_in_fp32_whatever_the_model_computes_in():
    placement = Placement.of(solo_context(), torch.bfloat16)
    router = Router(0, router_weight(0, 4, model_spec(config()).stream, placement), router_spec(config()))
    with torch.no_grad():
        router.weight.copy_(randn(3, 4, 8))
    x = randn(4, 6, 8).bfloat16()
    found = router(x, tokens([6]), inputs())
    expected = x.double() @ router.weight.double().t()
    assert {found.logits.dtype, found.weights.dtype, found.probabilities.dtype} == {torch.float32}
    assert torch.allclose(found.logits.double(), expected, rtol=1e-6)
    assert not torch.allclose(expected.bfloat16().double(), expected, rtol=1e-4)


NOISY = {
    "jitter": {"moe_input_jitter_eps": 0.3},
    "first": {"moe_router_sampling": "first", "moe_router_topk": 1, "moe_router_pre_softmax": True},
    "second": {"moe_router_sampling": "second"},
    "forced": {"moe_router_force_load_balancing": True},
}


@over_table("kind", NOISY)
def test_noise_is_a_function_of_seed_layer_sample_and_position(kind):
    """The same for any share of the tokens, in any order; and off in evaluation."""
    table, whole = randn(5, 32, 4).float() * 0.1, tokens([16, 16])
    both = inputs((5, 9))
    found = route(table, whole, both, **NOISY[kind])
    for rows in (torch.arange(8), torch.arange(20, 32), torch.arange(31, -1, -3), torch.tensor([17])):
        some = whole.number[rows], whole.sequence[rows], whole.position[rows]
        part = Tokens(*some, None, whole.lengths, SoloGroup(), SoloGroup())
        own = route(table[rows], part, both, **NOISY[kind])
        assert torch.equal(own.experts, found.experts[rows])
        assert torch.equal(own.logits, found.logits[rows])
        # The same samples in other places of the micro-batch, with one more before them.
        part = replace(part, sequence=2 - part.sequence, lengths=torch.tensor([16] * 3))
        own = route(table[rows], part, inputs((3, 9, 5)), **NOISY[kind])
        assert torch.equal(own.experts, found.experts[rows])

    def seen(**where) -> torch.Tensor:
        given = inputs(where.get("samples", (5, 9)), seed=where.get("seed", 7))
        place = replace(whole, position=whole.position + where.get("shift", 0))
        other = route(table, place, given, layer=where.get("layer", 0), **NOISY[kind])
        return other.logits if kind == "jitter" else other.experts

    assert torch.equal(seen(), found.logits if kind == "jitter" else found.experts)
    others = [seen(), seen(layer=1), seen(seed=8), seen(samples=(6, 10)), seen(shift=16)]
    for i, one in enumerate(others):
        assert not any(torch.equal(one, other) for other in others[:i])
    noise = ("moe_router_sampling", "moe_input_jitter_eps", "moe_router_force_load_balancing")
    plain = {name: value for name, value in NOISY[kind].items() if name not in noise}
    quiet, clean = route(table, whole, inputs(), **NOISY[kind]), route(table, whole, both, **plain)
    assert not torch.equal(found.experts, clean.experts)
    assert torch.equal(quiet.experts, clean.experts)
    assert torch.equal(quiet.logits, table)


def shares(chosen: torch.Tensor, experts: int) -> list[float]:
    return (torch.bincount(chosen, minlength=experts) / len(chosen)).tolist()


def test_a_sampled_first_expert_has_the_probability_of_the_softmax():
    n, probabilities = 9000, (1 / 6, 2 / 6, 3 / 6)
    table = torch.tensor(probabilities).log().expand(n, 3)
    found = route(table, tokens([n]), inputs((4,)), **NOISY["first"])
    for share, p in zip(shares(found.experts[:, 0], 3), probabilities, strict=True):
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / n)
    expected = torch.tensor(probabilities)[found.experts]
    assert torch.allclose(found.weights, expected), "the weight is that of the softmax without noise"


def test_a_sampled_second_expert_is_drawn_from_the_others():
    n = 9000
    table = torch.tensor([6.0, 3.0, 2.0, 1.0]).log().expand(n, 4)
    found = route(table, tokens([n]), inputs((4,)), **NOISY["second"])
    assert shares(found.experts[:, 0], 4) == [1.0, 0.0, 0.0, 0.0]
    for share, p in zip(shares(found.experts[:, 1], 4), (0, 3 / 6, 2 / 6, 1 / 6), strict=True):
        assert abs(share - p) <= 4 * math.sqrt(p * (1 - p) / n)


def test_jitter_is_uniform_around_one():
    found = route(torch.ones(3000, 4), tokens([3000]), inputs((4,)), **NOISY["jitter"]).logits
    assert 0.7 <= found.min() < 0.701
    assert 1.299 < found.max() <= 1.3
    assert abs(found.mean() - 1) < 4 * 0.6 / math.sqrt(12 * found.numel())
    assert found.unique().numel() > 11000


def test_a_forced_choice_is_even_and_passes_its_gradient_to_the_logits():
    """Megatron-LM's `RandomSTE`: normal numbers forward, the gradient as it comes backward."""
    n, table = 4000, torch.zeros(4000, 4)
    table[:, 2] = 50.0  # without force, the best of every token
    table.requires_grad_()
    found = route(table, tokens([n]), inputs((4,)), **NOISY["forced"])
    assert all(abs(share - 0.25) < 4 * math.sqrt(0.25 * 0.75 / n) for share in shares(found.experts[:, 0], 4))
    normal = found.logits.detach()
    assert abs(normal.mean()) < 4 / math.sqrt(normal.numel())
    assert abs(normal.var() - 1) < 4 * math.sqrt(2 / normal.numel())
    fixed = normal.clone().requires_grad_()
    wanted = route(fixed, tokens([n]), inputs((4,)))
    assert torch.equal(wanted.experts, found.experts)
    of_tokens = randn(6, n, 2).float()
    (grad,) = torch.autograd.grad((found.weights * of_tokens).sum(), table)
    (expected,) = torch.autograd.grad((wanted.weights * of_tokens).sum(), fixed)
    assert torch.equal(grad, expected)
    assert expected.abs().max() > 0


def test_gumbel_noise_is_finite(monkeypatch):
    """The largest uniform number, one step below 1, was once rounded to 1, whose noise is infinite."""
    ends = torch.tensor([[0.0, 1 - 2.0**-24]])
    monkeypatch.setattr(router_module, "hash_uniform", lambda key, index: ends)
    low, high = Noise(0, tokens([1]), inputs((1,))).gumbel(2)[0].tolist()
    assert low == pytest.approx(-math.log(25 * math.log(2)), rel=1e-5)
    assert high == pytest.approx(24 * math.log(2), rel=1e-2)
