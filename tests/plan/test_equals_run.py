"""Law 5: a plan says what a run does. Each layout is planned and run, and the two are compared."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from megazero.account.memory import MemoryMeter
from megazero.config.steps import Progress
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.config import Config
from megazero.mpu.context import thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.traffic import TrafficLog, count_traffic
from megazero.plan.job import PlannedJob
from megazero.plan.plan import Plan
from megazero.train.step.timers import Timers
from megazero.verify.record import verification_engine
from tests.docs.pages import says
from tests.layouts.layout import Layout
from tests.layouts.selection import (
    allowed,
    candidates,
    context_layouts,
    covering,
    encoder_layouts,
    expert_layouts,
    hybrid_layouts,
    latent_layouts,
    pair_layouts,
    variant_layouts,
)
from tests.plan.unnoticed import unnoticed

AT_REST = ("weights", "masters", "moments", "gradients", "buffers")
BUNDLES = 12


def run(layout: Layout, job: PlannedJob) -> list[tuple[TrafficLog, dict, list[str]]]:
    """What each rank sent, held and did in the step, on the micro-batches that the plan is made with."""
    world = ThreadWorld(layout.world_size)

    def work(rank: int):
        log, order = TrafficLog(), []
        context = count_traffic(thread_context(world, layout.grid, rank, node_size=layout.hpz), log)
        context = unnoticed(context)
        engine = verification_engine(job.config, training_plan_of(job.config, context.data.size), context)
        batches = job.batches(context, job.micro_batches)
        meter = MemoryMeter.of(engine.optimizer.store, engine.executor)
        engine.executor.observer = lambda action, seconds: order.append(str(action))
        log.clear()
        with meter.over_a_step():
            engine.train_step(batches, Progress(), Timers())
        return log, meter.sizes(), order

    return world.run(work)


KINDS = (
    *((candidates, 25, 40), (expert_layouts, 8, 12), (context_layouts, 8, 12), (encoder_layouts, 8, 12)),
    *((variant_layouts, 6, 10), (latent_layouts, 3, 4), (hybrid_layouts, 5, 8), (pair_layouts, 8, 12)),
)
"""Layouts of a kind, how many of them by default, and how many in all."""
UNEVEN = (
    Layout(widths="halves", layers=4, pp=2, tp=2, sequence_parallel=True),
    Layout(widths="empty", layers=3, pp=2, zero=3, dp=2),
)


@cache
def selection() -> tuple[list[Layout], list[Layout]]:
    """Layouts of up to four ranks: the default suite's, and more."""
    few, more = list(UNEVEN), []
    for of, count, whole in KINDS:
        drawn = list(covering(of(4), whole, allowed=allowed))
        few += drawn[:count]
        more += drawn[count:whole]
    return few, more


def test_the_page_says_how_many() -> None:
    layouts = sum(whole for _, _, whole in KINDS) + len(UNEVEN)
    assert says("docs/plan.md", f"trains {layouts} layouts of up to four ranks")


def few_micro_batches(layout: Layout) -> Config:
    """The configuration with no more of them than there must be for all that a schedule does."""
    config = layout.config()
    size = min(layout.dp * layout.micro_batch * max(4, layout.pp), config.batch.global_batch_size)
    return config.model_copy(update={"batch": config.batch.model_copy(update={"global_batch_size": size})})


def planned_and_run(layout: Layout):
    """For each stage: its plans for kernels of a GPU and of a CPU, and what its first rank did."""
    config, size = few_micro_batches(layout), layout.world_size
    on_gpu, on_cpu = (PlannedJob(config, size, False, Progress(), device) for device in ("meta", "cpu"))
    ranks = run(layout, on_cpu)
    for paper, real in zip(Plan.of(on_gpu).stages, Plan.of(on_cpu).stages, strict=True):
        yield paper, real, ranks[on_cpu.line[paper.stage]]


def moved(calls, payload, experts: bool) -> dict:
    """Calls and bytes by group and operation, without those bytes that a router decides about."""
    chosen = ("expert", "all_to_all")
    return {key: (calls[key], None if experts and key == chosen else payload[key]) for key in calls}


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "more"])
@pytest.mark.parametrize("bundle", range(BUNDLES))
def test_a_plan_says_what_a_run_holds_moves_and_does(bundle, more):
    for layout in selection()[more][bundle::BUNDLES]:
        for paper, real, (log, held, order) in planned_and_run(layout):
            # Dropout's kernels of a GPU need less again when a layer is recomputed.
            for plan in (real,) if layout.dropout and layout.recompute == "full" else (paper, real):
                wanted = moved(log.calls, log.payload, bool(layout.experts))
                assert moved(plan.traffic, plan.payload, bool(layout.experts)) == wanted, layout.name
                assert [name for name, _, _ in plan.timeline][:-1] == order, layout.name
                for place in held.keys() | plan.memory.keys():
                    for kind in AT_REST:
                        ours, theirs = (x.get(place, {}).get(kind, 0) for x in (plan.memory, held))
                        assert ours == theirs, (layout.name, place, kind)
            if not layout.experts:  # whose rows are where their routers send tokens
                taken, boundary = held["device"]["activations"], real.trace.boundary
                off = abs(real.memory["device"]["activations"] - taken)
                assert off <= max(0.03 * taken, 3 * boundary), layout.name


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_of_many_micro_batches_is_the_sections_of_a_few_repeated(schedule, recompute):
    """Of 24, all are run, or the fewest: peaks, traffic and FLOPs of each stage are the same."""
    layout = Layout(pp=4, schedule=schedule, recompute=recompute, zero=1, layers=8)
    layout = replace(layout, virtual=2 if schedule == "interleaved" else 1)
    _repeats(layout)


@pytest.mark.slow
def test_so_is_one_of_groups_of_micro_batches():
    _repeats(Layout(pp=2, schedule="interleaved", virtual=2, group=3, zero=1, layers=4))


def _repeats(layout):
    config = layout.config()
    batch = config.batch.model_copy(update={"global_batch_size": 24 * layout.micro_batch})
    config = config.model_copy(update={"batch": batch})
    few, every = (PlannedJob(config, layout.pp, False, Progress()) for _ in range(2))
    vars(every)["traced_micro_batches"] = 24
    assert few.traced_micro_batches < 5
    for ours, theirs in zip(Plan.of(few).stages, Plan.of(every).stages, strict=True):
        assert (ours.traffic, ours.payload, ours.flops) == (theirs.traffic, theirs.payload, theirs.flops)
        off = abs(ours.peak.nbytes - theirs.peak.nbytes)
        assert off <= max(0.03 * theirs.peak.nbytes, 3 * ours.trace.boundary)
