"""Plans as numbers, and their way to every rank."""

from __future__ import annotations

import random

import torch

from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.serving.plan import Part, Plan, Reads, Relay


def plan_of(rng: random.Random, parts: int, tokens: int) -> Plan:
    def ids(most: int) -> list[int]:
        return [rng.randrange(1 << 20) for _ in range(rng.randint(0, most))]

    def some(count: int) -> list[int]:
        return [rng.randrange(99) for _ in range(count)]

    made = [Part(*some(4), Reads(*some(3)), ids(tokens), ids(5)) for _ in range(parts)]
    return Plan(made, ids(4), rng.random() < 0.5)


def test_a_plan_is_its_numbers():
    rng = random.Random(0)
    for parts in (0, 1, 7):
        plan = plan_of(rng, parts, 30)
        assert Plan.of_numbers(plan.numbers()) == plan
    assert Plan([Part(3, 0, 2, 9, Reads(1, 1, 0), [7, 8], [5])], [2], True).numbers() == [
        *(1, 1, 1, 2),
        *(3, 0, 2, 9, 1, 1, 0, 2, 1, 7, 8, 5),
    ]


def test_every_rank_gets_the_plan_of_the_first():
    """Short ones in one message, long ones in two; along two groups, one after another."""
    world, grid = ThreadWorld(4), ProcessGrid(tp=2, pp=2)
    plans = [plan_of(random.Random(seed), seed, 10 ** (1 + seed % 3)) for seed in range(8)]

    def work(rank: int) -> tuple[list[Plan], object, bool]:
        context = thread_context(world, grid, rank)
        wire = Relay([context.tp, context.pp], torch.device("cpu"))
        got = [wire.share(plan if wire.leads else Plan()) for plan in plans]
        wire.meet()
        return got, wire.value({"rank": rank}), wire.leads

    answers = world.run(work)
    assert [got for got, _, _ in answers] == [plans] * 4
    assert [value for _, value, _ in answers] == [{"rank": 0}] * 4
    assert [leads for _, _, leads in answers] == [True, False, False, False]


def test_a_rank_alone_sends_nothing():
    plan = Plan(last=True)
    assert Relay([], torch.device("cpu")).share(plan) is plan
