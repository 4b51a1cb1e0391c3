"""Who gets no room: literal tables, and the laws of capacity."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from megazero.moe.capacity import capacities, capacity, factor_of, kept_choices
from megazero.moe.router import Routing
from megazero.spec.resolve import router_spec
from tests.moe.samples import choice, config, inputs, laid_out, on_ranks, randn, tokens
from tests.tables import over_table

TWO = {"num_experts": (2,), "moe_router_topk": 1}


def kept(experts, lengths, weights=None, *, columns=None, samples=(1, 2, 3), total=2, layer=0, **settings):
    """bool [n, k] as lists, in the order of `tokens`."""
    given = choice(experts, weights, total)
    model = config(**{"moe_expert_capacity_factor": 1.0, **TWO, "num_experts": (total,), **settings})
    model = model.model_copy(update={"moe_router_topk": given.experts.shape[1]})
    used = inputs(samples[: len(lengths)] if samples else ())
    found = kept_choices(router_spec(model), layer, given, tokens(lengths, columns), used)
    return found.squeeze(1).tolist() if given.experts.shape[1] == 1 else found.tolist()


T, F = True, False


@over_table(
    ("policy", "weights", "expected"),
    [
        # Five tokens of which four chose expert 0, which has room for ceil(5 / 2) = 3.
        ("position", [0.5, 0.9, 0.7, 0.8, 0.6], [T, T, T, F, T]),
        ("probs", [0.5, 0.9, 0.7, 0.8, 0.6], [F, T, T, T, T]),
        ("probs", [0.9, 0.5, 0.7, 0.8, 0.6], [T, F, T, T, T]),
        # Of equal ones the later is dropped.
        ("probs", [0.7, 0.7, 0.7, 0.7, 0.7], [T, T, T, F, T]),
        ("probs", [0.5, 0.7, 0.5, 0.7, 0.1], [T, T, F, T, T]),
    ],
)
def test_who_is_dropped(policy, weights, expected):
    assert kept([0, 0, 0, 0, 1], [5], weights, moe_token_drop_policy=policy) == expected


def test_the_first_of_many_stay():
    """DeepSpeed's topk over a mask of ones and zeros kept tokens 3, 7 and 11 here, and dropped the tenth."""
    wanting = {3, 7, 10, 11}
    experts = [0 if i in wanting else 1 + i % 3 for i in range(12)]
    found = kept(experts, [12], total=4, moe_token_drop_policy="position")
    assert [i for i in range(12) if i in wanting and found[i]] == [3, 7, 10]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        # Room for ceil(3 * 2 / 2 * 0.5) = 2 of each expert. All first choices come before all second ones.
        ("position", [[T, T], [T, F], [T, F]]),
        # Expert 0 is wanted with 0.6, 0.7 and 0.45, expert 1 with 0.4, 0.3 and 0.55.
        ("probs", [[T, T], [T, F], [T, F]]),
    ],
)
def test_who_is_dropped_of_two_choices(policy, expected):
    weights = [[0.6, 0.4], [0.7, 0.3], [0.55, 0.45]]
    found = kept(
        [[0, 1], [0, 1], [1, 0]],
        [3],
        weights,
        moe_token_drop_policy=policy,
        moe_expert_capacity_factor=0.5,
    )
    assert found == expected


def test_a_second_choice_may_weigh_more_than_a_first_one():
    """Expert 0 has room for two: the second choice with 0.45 displaces the first choice with 0.3 by score."""
    experts, weights = [[0, 1], [0, 1], [1, 0]], [[0.6, 0.1], [0.3, 0.2], [0.5, 0.45]]
    settings = {"moe_expert_capacity_factor": 0.5}
    by_score = kept(experts, [3], weights, moe_token_drop_policy="probs", **settings)
    assert by_score == [[T, F], [F, T], [T, T]]
    by_place = kept(experts, [3], weights, moe_token_drop_policy="position", **settings)
    assert by_place == [[T, T], [T, F], [T, F]]


@over_table(
    ("experts", "each", "together"),
    [
        # Lengths 4 and 2: room for 2 and 1 of each expert, or for 3 of the two sequences together.
        ([[0, 0, 0, 0], [1, 1]], [[T, T, F, F], [T, F]], [[T, T, T, F], [T, T]]),
        ([[0, 0, 0, 1], [0, 0]], [[T, T, F, T], [T, F]], [[T, T, F, T], [T, F]]),
        ([[1, 0, 0, 0], [0, 0]], [[T, T, T, F], [T, F]], [[T, T, F, F], [T, T]]),
    ],
)
def test_capacity_is_of_each_sequence_or_of_the_micro_batch(experts, each, together):
    """Within a micro-batch the first ones are those of the first columns."""
    for scope, expected in (("sequence", each), ("micro_batch", together)):
        settings = {"moe_capacity_scope": scope, "moe_token_drop_policy": "position"}
        found = kept(laid_out(experts, 4), [4, 2], columns=4, **settings)
        assert [found[::2], found[1:4:2]] == expected


def test_a_sequence_alone_and_among_others_keeps_the_same():
    long, short = [0, 0, 1, 0, 0, 0, 1], [0, 0, 0]
    for policy in ("position", "probs", "random"):
        weights = [[0.3, 0.8, 0.5, 0.6, 0.2, 0.7, 0.1], [0.5, 0.4, 0.9]]
        settings = {"moe_token_drop_policy": policy}
        alone = kept(long, [7], weights[0], samples=(4,), **settings)
        other = kept(short, [3], weights[1], samples=(8,), **settings)
        both = kept(
            laid_out([short, long], 9),
            [3, 7],
            laid_out(weights[::-1], 9),
            columns=9,
            samples=(8, 4),
            **settings,
        )
        assert both[1:14:2] == alone
        assert both[:6:2] == other
        assert False in alone
        assert False in other


def test_random_selection_fills_the_room_with_any_tokens():
    experts, seen = [0] * 12 + [1] * 4, set()
    for sample in range(20):
        found = kept(experts, [16], samples=(sample,), moe_token_drop_policy="random")
        assert sum(found[:12]) == 8
        assert found[12:] == [T] * 4
        assert found == kept(
            experts, [16], list(range(16)), samples=(sample,), moe_token_drop_policy="random"
        ), "weights have no say"
        seen.add(tuple(found))
    assert len(seen) == 20
    assert kept(experts, [16], samples=(0,), moe_token_drop_policy="random", layer=1) not in map(list, seen)
    counts = [sum(each[i] for each in seen) for i in range(12)]
    assert min(counts) >= 5, "each place has its chance"
    assert max(counts) < 20
    evaluated = kept(experts, [16], samples=(), moe_token_drop_policy="random")
    assert sum(evaluated[:12]) == 8


@over_table("policy", ["position", "probs", "random"])
def test_the_floor_and_room_for_all(policy):
    own = {"moe_token_drop_policy": policy}
    assert sum(kept([0] * 8, [8], moe_expert_capacity_factor=0.25, **own)) == 1
    assert sum(kept([0] * 8, [8], moe_expert_capacity_factor=0.25, moe_min_capacity=3, **own)) == 3
    assert all(kept([0] * 8, [8], moe_expert_capacity_factor=100.0, **own)), "more room than tokens"
    assert all(kept([0] * 8, [8], moe_expert_capacity_factor=0.25, moe_min_capacity=50, **own))
    assert kept([1], [1], **own) == [T], "a single token"
    assert kept([[1, 0]], [1], moe_expert_capacity_factor=0.1, **own) == [[T, T]]


@over_table("policy", ["position", "probs", "random"])
def test_padding_takes_no_room(policy):
    """A row without a token claims expert 0 with the highest score, ahead of the tokens of other columns."""
    experts, weights = [[0, 0, 0, 0], [0]], [[0.5, 0.6, 0.7, 0.8], [0.5]]
    narrow = kept(
        laid_out(experts, 4), [4, 1], laid_out(weights, 4, 9.0), columns=4, moe_token_drop_policy=policy
    )
    wide = kept(
        laid_out(experts, 11), [4, 1], laid_out(weights, 11, 9.0), columns=11, moe_token_drop_policy=policy
    )
    assert wide[:8:2] == narrow[::2]
    assert wide[1] is narrow[1] is True
    assert sum(narrow[::2]) == 2
    assert not any(narrow[3::2])
    assert not any(wide[8:])
    scope = {"moe_capacity_scope": "micro_batch", "moe_token_drop_policy": policy}
    whole = kept(laid_out(experts, 11), [4, 1], laid_out(weights, 11, 9.0), columns=11, **scope)
    assert sum(whole) == 3, "ceil(5 / 2), wherever they are"


def test_capacity_rounds_up_and_knows_no_error_of_floats():
    """100 * 1.1 is 110.00000000000001 as floats go, and its ceiling 111."""
    assert math.ceil(100 * 1.1) == 111
    for factor, k, experts in (("1.1", 1, 1), ("1.1", 2, 4), ("1.05", 2, 8), ("0.7", 3, 16), ("2.3", 8, 64)):
        lengths = torch.arange(3000)
        model = config(num_experts=(experts,), moe_router_topk=k)
        found = capacities(router_spec(model), lengths, experts, float(factor)).tolist()
        assert found == [math.ceil(Fraction(factor) * n * k / experts) for n in range(3000)]
    wide = config(num_experts=(64,), moe_router_topk=8, moe_min_capacity=4)
    assert capacities(router_spec(wide), torch.tensor([0, 1, 32, 33, 4096]), 64, 1.0).tolist() == [
        4,
        4,
        4,
        5,
        512,
    ]


def test_which_factor_counts():
    training, evaluation = inputs((1,)), inputs()
    generation = replace(evaluation, core=object())

    def factors(**settings) -> list[float | None]:
        return [
            factor_of(router_spec(config(**settings)).capacity, given)
            for given in (training, evaluation, generation)
        ]

    assert factors(moe_expert_capacity_factor=1.5) == [1.5, 1.5, None]
    assert factors(moe_expert_capacity_factor=1.5, moe_eval_capacity_factor=2.0) == [1.5, 2.0, None]
    assert factors() == [None] * 3
    none = config()
    assert kept_choices(router_spec(none), 0, choice([0, 0]), tokens([2]), inputs((1,))) is None
    evaluated = {"moe_expert_capacity_factor": 0.5, "moe_eval_capacity_factor": 1.5}
    assert sum(kept([0] * 4, [4], **evaluated)) == 1
    assert sum(kept([0] * 4, [4], samples=(), **evaluated)) == 3


@over_table("ranks", [2, 4])
@over_table("scope", ["sequence", "micro_batch"])
@over_table("policy", ["position", "probs", "random"])
def test_ranks_that_share_the_tokens_agree(policy, scope, ranks):
    lengths, columns = [8, 5, 3], 8
    chosen = torch.stack([randn(i, 4).argsort()[:2] for i in range(24)]) // 2 * 2 % 4
    chosen[:, 1] += 1
    weights = (randn(50, 24, 2).float() * 2).round() / 2  # many are equal
    model = config(moe_expert_capacity_factor=0.7, moe_token_drop_policy=policy, moe_capacity_scope=scope)

    def work(context):
        own = tokens(lengths, columns, context.tp)
        part = Routing(own.own(chosen), own.own(weights), torch.ones(own.count, 4), torch.ones(own.count, 4))
        return kept_choices(router_spec(model), 3, part, own, inputs((1, 5, 2)))

    (whole,) = on_ranks(work)
    assert torch.equal(torch.cat(on_ranks(work, ranks, tp=ranks)), whole)
    assert 0 < whole.sum() < 2 * sum(lengths)


@pytest.mark.parametrize("least", [0, 4])
def test_the_room_of_a_length_that_the_host_knows(least):
    lengths = torch.arange(1, 200)
    for topk in (1, 2, 3):
        for experts in (4, 7):
            for factor in (0.5, 1.0, 1.25, 1.1):
                model = config(moe_router_topk=topk, moe_min_capacity=least)
                found = [capacity(router_spec(model), length, experts, factor) for length in lengths.tolist()]
                assert found == capacities(router_spec(model), lengths, experts, factor).tolist()
