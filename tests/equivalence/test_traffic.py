"""What a step sends: recorded on meta tensors it is what ranks count, and it equals the formulas."""

from __future__ import annotations

import math
from functools import cache

import pytest

from megazero.config.steps import Progress
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.config import Config
from megazero.mpu.context import ParallelContext, thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.traffic import TrafficLog, count_traffic, recording_context
from megazero.train.step.engine import StepResult
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from tests.equivalence.one_process import pairs_met
from tests.layouts.layout import GLOBAL_BATCH, SEQUENCE, Layout
from tests.layouts.selection import allowed, candidates, covering

FP32 = 4
HIDDEN = 32
BUNDLES = 8


def step(config: Config, context: ParallelContext, log: TrafficLog) -> StepResult:
    """One training step, of which alone `log` tells."""
    training_plan = training_plan_of(config, context.data.size)
    engine, first = verification_engine(config, training_plan, context), training_plan.at(Progress())
    batches = micro_batches(config, context, first)
    log.clear()
    return engine.train_step(batches, first.before, Timers())


def traffic(layout: Layout, config: Config | None = None) -> list[TrafficLog]:
    """What each rank sends in one step, counted."""
    world, config = ThreadWorld(layout.world_size), config or layout.config()

    def work(rank: int) -> TrafficLog:
        log = TrafficLog()
        context = thread_context(world, layout.grid, rank, node_size=layout.hpz)
        step(config, count_traffic(context, log), log)
        return log

    return world.run(work)


@cache
def selection() -> list[Layout]:
    """40 layouts in which every pair of settings meets, of up to four ranks, with three of their own kind."""
    eight = {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": True, "layers": 4}
    special = [
        Layout(**eight, zero=3, schedule="zb-v"),
        Layout(**eight, zero=2, schedule="interleaved", virtual=2, untied=True, overlap=False),
        Layout(dp=4, zero=3, hpz=2, untied=True),
    ]
    return [*special, *covering(candidates(4), 40 - len(special), allowed=allowed)]


def test_the_selection_holds_every_pair_of_settings():
    assert len(set(selection())) == 40
    names = ("tp", "pp", "dp", "schedule", "zero", "sequence_parallel", "recompute", "untied", "keep")
    assert pairs_met(candidates(4), names, names, allowed) <= pairs_met(selection(), names, names)


def few_micro_batches(layout: Layout) -> Config:
    """The configuration with no more of them than the schedules need."""
    config = layout.config()
    size = layout.dp * layout.micro_batch * max(2, layout.pp)
    return config.model_copy(update={"batch": config.batch.model_copy(update={"global_batch_size": size})})


@pytest.mark.parametrize("bundle", range(BUNDLES))
def test_recorded_traffic_is_what_ranks_count(bundle):
    """Calls and bytes by communicator and operation, on every rank of one replica."""
    for number in range(bundle, 40, BUNDLES):
        layout = selection()[number]
        config, replica = few_micro_batches(layout), number % layout.dp
        recorded = {}
        for rank, counted in enumerate(traffic(layout, config)):
            place = layout.grid.place(rank)
            stage = place.index("pp")
            if place.index("dp") != replica:
                continue
            if stage not in recorded:
                log = recorded[stage] = TrafficLog()
                context = recording_context(layout.grid, rank, log, node_size=layout.hpz)
                result = step(config, context, log)
                assert math.isnan(result.grad_norm)
                assert not result.skipped
            # Tensor-parallel ranks all do the same.
            assert counted == recorded[stage], f"rank {rank} of {layout.name}"


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_recorded_traffic_of_whole_matrices_is_what_ranks_count(zero):
    """Each rank gathers those of which it holds a part, so that ranks of one model differ by replica only."""
    layout = Layout(optimizer="muon", tp=2, pp=2, dp=2, zero=zero, shape="llama")
    config = few_micro_batches(layout)
    for rank, counted in enumerate(traffic(layout, config)):
        log = TrafficLog()
        step(config, recording_context(layout.grid, rank, log), log)
        assert counted == log, f"rank {rank}"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)])
def test_a_pipeline_sends_each_boundary_once_in_each_direction(schedule, tp, sp):
    virtual = 2 if schedule == "interleaved" else 1
    chunks = 4 if schedule in ("interleaved", "zb-v") else 2
    layout = Layout(
        pp=2, tp=tp, sequence_parallel=sp, schedule=schedule, virtual=virtual, layers=chunks, untied=True
    )
    logs = traffic(layout)
    # In a V the turn of it is within one stage.
    boundaries = {"zb-v": 2}.get(schedule, chunks - 1)
    # Under sequence parallelism only this rank's rows cross.
    hidden = SEQUENCE * HIDDEN * FP32 // (tp if sp else 1)
    for kind in ("send", "recv"):
        total = sum(log.payload["pp", kind] for log in logs) / tp
        assert total == 2 * boundaries * GLOBAL_BATCH * hidden


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_tensor_parallelism_reduces_twice_per_layer_and_direction(layers, micro_batch):
    layout = Layout(tp=2, layers=layers, micro_batch=micro_batch)
    hidden = SEQUENCE * GLOBAL_BATCH * HIDDEN * FP32  # of all micro-batches
    position = SEQUENCE * GLOBAL_BATCH * FP32
    # Two row-parallel layers forward and two column-parallel ones backward per layer, embedding, head;
    # of each position's loss the largest logit, the sum of exponentials and the label's logit.
    expected = hidden * (4 * layers + 2) + 3 * position
    for log in traffic(layout):
        norm = log.payload["world", "all_reduce"] + log.payload["model", "all_reduce"]
        assert norm == 8  # one float64
        assert log.payload["tp", "all_reduce"] == expected


def test_sequence_parallelism_moves_as_much_in_halves():
    layers = 2
    hidden = SEQUENCE * GLOBAL_BATCH * HIDDEN * FP32
    for log in traffic(Layout(tp=2, layers=layers, sequence_parallel=True)):
        # Row-parallel layers and the embedding scatter forward and gather backward; column-parallel ones and
        # the head gather forward, and backward gather again for the weight and scatter.
        assert log.payload["tp", "reduce_scatter"] == hidden * (4 * layers + 2)
        assert log.payload["tp", "all_gather"] == hidden * (2 * layers + 1) + 2 * hidden * (2 * layers + 1)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("dp", [2, 4])
def test_zero_sends_what_its_paper_says(zero, dp):
    # One micro-batch per rank, nothing kept: 2 psi for stages 0 to 2, 3 psi for stage 3.
    layout = Layout(dp=dp, zero=zero, micro_batch=GLOBAL_BATCH // dp, untied=True)
    world, config = ThreadWorld(dp), layout.config()
    parameters = {}

    def sizes(rank: int) -> None:
        context = thread_context(world, layout.grid, rank)
        engine = verification_engine(config, training_plan_of(config, context.data.size), context)
        parameters[rank] = [
            (b.layout.padded, b.layout.row.shard_params) for b in engine.optimizer.store.buckets
        ]

    world.run(sizes)
    psi = sum(size for size, _ in parameters[0]) * FP32
    sharded = sum(size for size, cut in parameters[0] if cut) * FP32
    for log in traffic(layout):
        # An all-reduce moves what a reduce-scatter and an all-gather do.
        reduced, gathered = log.payload["replica", "reduce_scatter"], log.payload["replica", "all_gather"]
        if zero == 0:
            assert (log.payload["replica", "all_reduce"], reduced, gathered) == (psi, 0, 0)
        elif zero < 3:
            assert (reduced, gathered) == (psi, psi)
        else:
            # Gathered for forward and backward; small parameters stay whole and are gathered once.
            assert (reduced, gathered) == (psi, 2 * sharded + (psi - sharded))
            assert sharded > 0.9 * psi


@pytest.mark.parametrize("pp", [1, 2])
def test_a_loss_term_costs_its_count_before_backward_and_its_sum_at_the_end(pp):
    for log in traffic(Layout(dp=2, pp=pp)):
        found = {key: (log.calls[key], log.payload[key]) for key in log.calls if key[0] == "batch"}
        assert found == {("batch", "all_reduce"): (2, 2 * 8)}  # float64 of one term each


def test_stage_2_and_3_reduce_in_every_micro_batch_and_0_and_1_once():
    counts = []
    for zero in range(4):
        log = traffic(Layout(dp=2, zero=zero, bucket_size=10**9))[0]
        counts.append(log.calls["replica", "all_reduce"] + log.calls["replica", "reduce_scatter"])
    micro_batches_per_rank = GLOBAL_BATCH // 2
    assert counts[0] == counts[1]
    assert counts[2] == counts[1] * micro_batches_per_rank
    assert math.isclose(counts[3] % micro_batches_per_rank, 0)
