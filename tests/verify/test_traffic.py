"""What a step sends, counted at the groups, equals the formulas: pipeline, tensor and data parallelism."""

from __future__ import annotations

import math

import pytest

from megazero.mpu import ThreadWorld, TrafficLog, count_traffic, thread_context
from megazero.optim import Progress
from megazero.train.timers import Timers
from megazero.verify.layouts import GLOBAL_BATCH, SEQUENCE, Layout
from megazero.verify.record import micro_batches, verification_engine

FP32 = 4
HIDDEN = 32


def traffic(layout: Layout) -> list[TrafficLog]:
    """What each rank sends in one step."""
    world, config = ThreadWorld(layout.world_size), layout.config()

    def work(rank: int) -> TrafficLog:
        log = TrafficLog()
        context = count_traffic(thread_context(world, layout.grid, rank), log)
        engine = verification_engine(config, context)
        batches = micro_batches(config, context, 0)
        log.calls.clear()
        log.payload.clear()
        engine.train_step(batches, GLOBAL_BATCH * SEQUENCE, Progress(0, 0, 0), Timers())
        return log

    return world.run(work)


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
        engine = verification_engine(config, thread_context(world, layout.grid, rank))
        parameters[rank] = [(b.padded, b.row.shard_params) for b in engine.optimizer.buckets]

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


def test_stage_2_and_3_reduce_in_every_micro_batch_and_0_and_1_once():
    counts = []
    for zero in range(4):
        log = traffic(Layout(dp=2, zero=zero, bucket_size=10**9))[0]
        counts.append(log.calls["replica", "all_reduce"] + log.calls["replica", "reduce_scatter"])
    micro_batches_per_rank = GLOBAL_BATCH // 2
    assert counts[0] == counts[1]
    assert counts[2] == counts[1] * micro_batches_per_rank
    assert math.isclose(counts[3] % micro_batches_per_rank, 0)
