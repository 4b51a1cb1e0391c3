"""What gradients take beside their sums at stages 2 and 3, measured over schedules and layouts."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import pytest
from torch import nn

from megazero.config.steps import Progress
from megazero.config.training_plan import training_plan_of
from megazero.mpu.context import thread_context
from megazero.mpu.param_spec import spec_of
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from megazero.zero.reduce import GradientReducer
from tests.layouts.layout import Layout

FP32 = 4


@dataclass
class Peak:
    """The most that existed at once, on one rank, in a step.

    Attributes:
        buffers: transient buffers, those kept for their next use included.
        bytes: of these.
        waiting: bytes of gradients that wait for a buffer.
        largest: bytes of the stage's largest bucket.
        early: bytes of the gradients that the input half of a backward brings.
        whole: bytes of all gradients of the stage.
    """

    buffers: int = 0
    bytes: int = 0
    waiting: int = 0
    largest: int = 0
    early: int = 0
    whole: int = 0


def watch(reducer: GradientReducer) -> Peak:
    """Start to measure a reducer."""
    peak, alive = Peak(), {}
    take, collect = reducer._buffers.take, reducer.collect

    def counted_take(bucket):
        buffer = take(bucket)
        if id(buffer) not in alive:
            alive[id(buffer)] = buffer.numel() * buffer.element_size()
            weakref.finalize(buffer, alive.pop, id(buffer))
        peak.buffers, peak.bytes = max(peak.buffers, len(alive)), max(peak.bytes, sum(alive.values()))
        return buffer

    def counted_collect(param, product=None):
        collect(param, product)
        held = (tensor for progress in reducer._progress for tensor in progress.waiting.values())
        peak.waiting = max(peak.waiting, sum(tensor.numel() * tensor.element_size() for tensor in held))

    reducer._buffers.take, reducer.collect = counted_take, counted_collect
    return peak


def measure(layout: Layout) -> list[Peak]:
    """The peaks of every rank in one step."""
    world, config = ThreadWorld(layout.world_size), layout.config()

    def work(rank: int) -> Peak:
        context = thread_context(world, layout.grid, rank)
        training_plan = training_plan_of(config, context.data.size)
        engine, step = verification_engine(config, training_plan, context), training_plan.at(Progress())
        peak = watch(engine.executor.sharding._reducer)
        engine.train_step(micro_batches(config, context, step), step.before, Timers())
        buckets = engine.optimizer.store.buckets
        params = [param for bucket in buckets for param in bucket.params]
        peak.largest = max(bucket.layout.padded for bucket in buckets) * FP32
        peak.whole = sum(param.numel() for param in params) * FP32
        peak.early = sum(param.numel() for param in params if comes_early(param)) * FP32
        return peak

    return world.run(work)


def comes_early(param: nn.Parameter) -> bool:
    """Whether its gradient is no product that can wait: norms, biases, embeddings."""
    name = spec_of(param).name
    return "norm" in name or name.endswith("bias") or name.startswith("embedding")


def layout(schedule: str, pp: int, zero: int, **changes) -> Layout:
    """Two replicas, four micro-batches, and at least six buckets on every stage."""
    virtual = 2 if schedule == "interleaved" else 1
    layers = max(4, pp * (2 if schedule in ("interleaved", "zb-v") else 1))
    settings = {"dp": 2, "layers": layers, "bucket_size": 1200, "untied": pp == 4, **changes}
    return Layout(pp=pp, zero=zero, schedule=schedule, virtual=virtual, **settings)


LAYOUTS = [
    *(layout(schedule, 2, zero) for schedule in ("1f1b", "gpipe", "interleaved") for zero in (2, 3)),
    *(layout(schedule, pp, zero) for schedule in ("zb-h1", "zb-v") for pp in (2, 4) for zero in (2, 3)),
    layout("zb-v", 2, 2, tp=2, sequence_parallel=True),
    layout("zb-h1", 2, 3, bucket_size=1),
    layout("zb-h1", 2, 2, bucket_size=10**9),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.name}-{layout.bucket_size}")
def test_two_buffers_exist_at_most(layout):
    """Biases and norms used to open every bucket long before the gradients of weights came (15, not 2)."""
    for peak in measure(layout):
        assert 1 <= peak.buffers <= 2
        assert peak.bytes <= 2 * peak.largest
        # Sums over micro-batches, so that it does not matter how many are ahead.
        assert peak.waiting <= peak.early
        if layout.schedule == "zb-h1":
            assert peak.waiting == peak.early


def test_without_overlap_the_gradients_of_a_backward_wait():
    for peak in measure(layout("1f1b", 2, 2, overlap=False)):
        assert peak.buffers == 2
        assert peak.waiting == peak.whole
