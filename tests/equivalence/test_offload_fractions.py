"""A part of the state offloaded: whichever part, no bit of the training depends on it, and it can be saved.

Each rank once chose the part for itself. A tied embedding then was offloaded on one pipeline stage and not on
the other, and the comparison of copies before a save failed, or waited for ever over Gloo.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import cycle

import pytest
import torch

from megazero.config.offload import OffloadConfig
from megazero.config.training_plan import training_plan_of
from megazero.config.tree import Config
from megazero.config.tree_output import CheckpointConfig
from megazero.mpu import Launch, ParallelContext, ThreadWorld, open_context, thread_context
from megazero.mpu.launch import close_groups
from megazero.train.resume import resume
from megazero.train.snapshot import Snapshots
from megazero.train.state import TrainState
from megazero.train.timers import Timers
from megazero.verify.layouts import VOCABULARY, Layout
from megazero.verify.record import micro_batches, verification_engine
from megazero.verify.selection import allowed, candidates, expert_layouts
from megazero.zero import CopyCheck

FRACTIONS = (0.1, 0.3, 0.5, 0.9)
COUNT = 64
DEFAULT = 10
STEPS = 2


@dataclass(frozen=True)
class Member:
    """A layout whose masters and moments are offloaded in part."""

    layout: Layout
    fraction: float
    tier: str
    gloo: bool = False

    @property
    def name(self) -> str:
        return f"{self.layout.name}-{self.fraction:g}-{self.tier}" + ("-gloo" if self.gloo else "")

    def config(self, tmp_path: object) -> Config:
        """With a folder to save to."""
        path = str(tmp_path) if self.tier == "nvme" else None
        offload = OffloadConfig(optimizer=self.tier, fraction=self.fraction, path=path, block_size=4096)
        folder = f"{tmp_path}/checkpoints"
        config = self.layout.config().model_copy(
            update={"offload": offload, "checkpoint": CheckpointConfig(save=folder, load=folder)}
        )
        if not self.gloo:
            return config
        parallel = config.parallel.model_copy(update={"distributed_backend": "gloo"})
        return config.model_copy(update={"parallel": parallel})


@cache
def members() -> tuple[Member, ...]:
    """`COUNT` of them: half are pipelines with a tied embedding, a quarter pipelines with experts."""
    dice = random.Random(3)
    dense = [each for each in candidates(most_ranks=4) if each.world_size > 1]
    dice.shuffle(dense)
    ties = (each for each in dense if each.pp > 1 and not each.untied and allowed(each))
    rest = (each for each in dense if (each.pp == 1 or each.untied) and allowed(each))
    experts = (each for each in expert_layouts(most_ranks=4, count=200) if each.world_size > 1 < each.pp)
    sources, tiers = (ties, experts, ties, rest), cycle(("cpu", "cpu", "nvme"))
    chosen = []
    for number in range(COUNT):
        layout, fraction = next(sources[number % 4]), FRACTIONS[(number // 2) % 4]
        gloo = number % 8 == 0  # a tied embedding on two stages
        chosen.append(Member(layout, fraction, "cpu" if gloo else next(tiers), gloo))
    return tuple(chosen)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "member" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--all-layouts") or metafunc.config.getoption("--slow")
        chosen = members() if whole else members()[:DEFAULT]
        metafunc.parametrize("member", chosen, ids=[each.name for each in chosen])


def state_of(engine) -> list:
    """All that is saved of an optimizer, gathered."""
    everything = engine.optimizer.full_state()
    return [
        (spec.name, {kind: tensor.clone() for kind, tensor in kinds.items()}) for spec, kinds in everything
    ]


def train_and_resume(config: Config, context: ParallelContext) -> tuple[list, list, list]:
    """The state after some steps, what a comparison of copies finds, and the state after a resume."""
    training_plan = training_plan_of(config, context.data.size)
    build = partial(verification_engine, context=context)
    engine, state = build(config, training_plan), TrainState()
    for _ in range(STEPS):
        step = training_plan.at(state.progress)
        result = engine.train_step(micro_batches(config, context, step), state.progress, Timers())
        state = state.after(step, result.skipped)
    differences = list(CopyCheck(engine.optimizer, context).compare().differences)
    snapshots = Snapshots(config, training_plan, engine, context, VOCABULARY, config.training.seed)
    snapshots.save(state)
    snapshots.saver.close()
    resumed = resume(config, context, VOCABULARY, build)
    assert resumed.state.iteration == STEPS
    return state_of(engine), differences, state_of(resumed.engine)


def in_process(rank: int, world_size: int, config: Config, layout: Layout) -> tuple[list, list, list]:
    """`train_and_resume` on a real rank."""
    context = open_context(config.parallel, Launch(rank, world_size, rank), torch.device("cpu"))
    try:
        return train_and_resume(config, context)
    finally:
        close_groups(context)


def assert_same(one: list, other: list) -> None:
    assert [name for name, _ in one] == [name for name, _ in other]
    for (name, left), (_, right) in zip(one, other, strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[kind], right[kind]) for kind in left), name


def test_no_bit_depends_on_which_part_is_offloaded(member, tmp_path, pool):
    layout, part, whole = member.layout, tmp_path / "part", tmp_path / "whole"
    part.mkdir()
    whole.mkdir()
    config, all_of_it = member.config(part), replace(member, fraction=1.0, gloo=False).config(whole)

    def in_threads(config: Config) -> list[tuple[list, list, list]]:
        world = ThreadWorld(layout.world_size)
        return world.run(lambda rank: train_and_resume(config, thread_context(world, layout.grid, rank)))

    results = pool.run(in_process, layout.world_size, config, layout) if member.gloo else in_threads(config)
    for (trained, differences, resumed), (wanted, _, _) in zip(results, in_threads(all_of_it), strict=True):
        assert differences == []
        assert_same(trained, resumed)
        if not member.gloo:  # its sums have another order
            assert_same(trained, wanted)


def test_the_sweep_holds_what_went_wrong():
    everything = members()
    assert len({member.name for member in everything}) == COUNT >= 60
    tied = [m for m in everything if m.layout.pp > 1 and not m.layout.untied]
    assert {m.fraction for m in tied} == set(FRACTIONS)
    assert {m.layout.zero for m in tied} == {0, 1, 2, 3}
    assert {m.layout.tp for m in tied} >= {1, 2}
    assert sum(bool(m.layout.experts) for m in everything) >= 10
    assert any(m.gloo and m.layout.pp > 1 and not m.layout.untied for m in everything[:DEFAULT])
