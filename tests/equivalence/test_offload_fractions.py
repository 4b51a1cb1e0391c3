"""A part of the state offloaded: whichever part, no bit of the training depends on it, and it can be saved.

Each rank once chose the part for itself. A tied embedding then was offloaded on one pipeline stage and not on
the other, and the comparison of copies before a save failed, or waited for ever over Gloo.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations
from typing import Any

import pytest
import torch

from megazero.config.training_plan import training_plan_of
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.config.tree.config import Config
from megazero.config.tree.offload import OffloadConfig
from megazero.mpu.context import ParallelContext, thread_context
from megazero.mpu.launch import Launch, close_groups, open_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.resume.resume import resume
from megazero.train.resume.snapshot import Snapshots
from megazero.train.step.engine import Engine
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from megazero.zero.copies import CopyCheck
from tests.layouts.layout import VOCABULARY, Layout
from tests.layouts.selection import allowed, candidates, expert_layouts

FRACTIONS = (0.1, 0.3, 0.5, 0.9)
TIERS = ("cpu", "cpu", "nvme")
THREADS, GLOO = "threads", "gloo"
COUNT = 72
STEPS = 2


@dataclass(frozen=True)
class Member:
    """A layout whose masters and moments are offloaded in part.

    Attributes:
        layout: the layout.
        fraction, tier: how much is offloaded, and where to.
        ranks: threads, or processes over Gloo.
    """

    layout: Layout
    fraction: float
    tier: str
    ranks: str = THREADS

    @property
    def name(self) -> str:
        ranks = {THREADS: "", GLOO: "-gloo"}[self.ranks]
        return f"{self.layout.name}-{self.layout.dtype}-{self.fraction:g}-{self.tier}{ranks}"

    @property
    def ties(self) -> bool:
        """Whether two stages hold the same embedding; with zb-v both its uses are on the first stage."""
        return self.layout.pp > 1 and not self.layout.untied and self.layout.schedule != "zb-v"

    @property
    def reference(self) -> OffloadConfig:
        """What the training is compared with: all state on the device.

        A single replica shards its sums at stages 2 and 3, and its weights at 3, only if it offloads. Its
        buckets and the order of its sums are then those of a run that may offload, but nothing of it.
        """
        alone = self.layout.dp == 1 and self.layout.zero >= 2
        return OffloadConfig(optimizer="cpu", fraction=0.0) if alone else OffloadConfig()

    @property
    def pairs(self) -> frozenset:
        """All pairs of its settings."""
        layout = self.layout
        settings = {
            **{name: getattr(layout, name) > 1 for name in ("tp", "pp", "dp")},
            "zero": layout.zero,
            "dtype": layout.dtype,
            "ties": self.ties,
            "experts": bool(layout.experts),
            "fraction": self.fraction,
            "tier": self.tier,
        }
        return frozenset(combinations(settings.items(), 2))

    def config(self, tmp_path: object, *, offloaded: bool = True) -> Config:
        """The configuration, with a folder to save to; or with all state on the device."""
        path = str(tmp_path) if self.tier == "nvme" else None
        offload = OffloadConfig(optimizer=self.tier, fraction=self.fraction, path=path, block_size=4096)
        folder = f"{tmp_path}/checkpoints"
        config = self.layout.config()
        backend = "auto" if self.ranks == THREADS else self.ranks
        return config.model_copy(
            update={
                "offload": offload if offloaded else self.reference,
                "checkpoint": CheckpointConfig(save=folder, load=folder),
                "parallel": config.parallel.model_copy(update={"distributed_backend": backend}),
            }
        )


def drawn_members(dice: random.Random) -> Iterator[Member]:
    """Members without end, of which half are pipelines with a tied embedding; many have experts."""
    dense = [each for each in candidates(most_ranks=4) if each.world_size > 1]
    experts = [each for each in expert_layouts(most_ranks=4, count=400) if each.world_size > 1]
    while True:
        layout = dice.choice(dice.choice((dense, dense, experts)))
        layout = replace(layout, dtype=dice.choice(("fp32", "bf16")))
        member = Member(layout, dice.choice(FRACTIONS), dice.choice(TIERS))
        if (member.ties or dice.random() < 0.15) and allowed(layout):
            yield member


@cache
def members() -> tuple[Member, ...]:
    """`COUNT` of them; the first `covering` are few that have every pair of settings that the others have."""
    source = drawn_members(random.Random(3))
    drawn = [next(source) for _ in range(400)]
    chosen: list[Member] = []
    missing = all_pairs(drawn)
    while missing:
        chosen.append(max(drawn, key=lambda member: len(member.pairs & missing) / (2 + cost(member))))
        missing -= chosen[-1].pairs
    chosen += (member for member in drawn if member not in chosen)
    # Those that went wrong: a tied embedding on two stages of real processes.
    tied = [i for i, member in enumerate(chosen[:COUNT]) if member.ties and member.layout.world_size == 2]
    for place in tied[:8:2]:
        chosen[place] = replace(chosen[place], ranks=GLOO)
    return tuple(chosen[:COUNT])


def cost(member: Member) -> float:
    """About how long a member takes."""
    return member.layout.world_size / member.layout.micro_batch


def all_pairs(chosen: Iterable[Member]) -> set:
    """Every pair of settings that one of these has."""
    return set().union(*(member.pairs for member in chosen))


@cache
def covering() -> int:
    """How many of the first members have every pair of settings of all."""
    wanted = all_pairs(members())
    return next(n for n in range(COUNT + 1) if all_pairs(members()[:n]) == wanted)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "member" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--all-layouts") or metafunc.config.getoption("--slow")
        chosen = members() if whole else members()[: covering()]
        metafunc.parametrize("member", chosen, ids=[each.name for each in chosen])


def state_of(engine: Engine) -> dict:
    """All that is saved of an optimizer, gathered, by name and kind."""
    everything = engine.optimizer.full_state()
    return {(spec.name, kind): tensor.clone() for spec, kinds in everything for kind, tensor in kinds.items()}


def trained(config: Config, context: ParallelContext) -> tuple[Engine, TrainState]:
    """An engine after some steps."""
    training_plan = training_plan_of(config, context.data.size)
    engine, state = verification_engine(config, training_plan, context), TrainState()
    for _ in range(STEPS):
        step = training_plan.at(state.progress)
        result = engine.train_step(micro_batches(config, context, step), state.progress, Timers())
        state = state.after(step, result.skipped)
    return engine, state


def train_and_resume(config: Config, context: ParallelContext) -> tuple[dict, list, dict]:
    """The state after some steps, what a comparison of copies finds, and the state after a resume."""
    training_plan = training_plan_of(config, context.data.size)
    engine, state = trained(config, context)
    differences = list(CopyCheck(engine.optimizer, context).compare().differences)
    snapshots = Snapshots(config, training_plan, engine, context, VOCABULARY, config.training.seed)
    snapshots.save(state)
    snapshots.saver.close()
    resumed = resume(config, context, VOCABULARY, partial(verification_engine, context=context))
    assert resumed.state.iteration == STEPS
    return state_of(engine), differences, state_of(resumed.engine)


def train(config: Config, context: ParallelContext) -> dict:
    """The state after as many steps, with nothing saved."""
    return state_of(trained(config, context)[0])


def in_process(
    rank: int, world_size: int, config: Config, work: Callable[[Config, ParallelContext], Any]
) -> Any:
    """Do this work on a real rank."""
    context = open_context(config.parallel, Launch(rank, world_size, rank), torch.device("cpu"))
    try:
        return work(config, context)
    finally:
        close_groups(context)


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


def test_no_bit_depends_on_which_part_is_offloaded(member, tmp_path, pool):
    layout = member.layout
    on_device = member.config(tmp_path, offloaded=False)

    def run(work: Callable[[Config, ParallelContext], Any], config: Config) -> list:
        if member.ranks != THREADS:
            return pool.run(in_process, layout.world_size, config, work)
        world = ThreadWorld(layout.world_size)
        return world.run(lambda rank: work(config, thread_context(world, layout.grid, rank)))

    offloaded = run(train_and_resume, member.config(tmp_path))
    for (state, differences, resumed), wanted in zip(offloaded, run(train, on_device), strict=True):
        assert differences == []
        assert_same(state, resumed)
        assert_same(state, wanted)


def test_the_sweep_holds_what_went_wrong():
    everything, default = members(), members()[: covering()]
    assert len({member.name for member in everything}) == COUNT >= 60
    for chosen in (everything, default):
        tied = [member for member in chosen if member.ties]
        assert {member.fraction for member in tied} == set(FRACTIONS)
        assert {member.layout.zero for member in tied} == {0, 1, 2, 3}
        assert {member.layout.tp for member in tied} == {1, 2}
        assert {member.ranks for member in tied} == {THREADS, GLOO}
    assert sum(member.ties for member in everything) >= COUNT // 2
    assert sum(bool(member.layout.experts) for member in everything) >= 10
