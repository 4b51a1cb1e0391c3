"""Weights that an update gathers: on their way while the next forward runs, and there when it reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megazero.config.resolve import parse_config
from megazero.config.steps import Progress
from megazero.config.training_plan import training_plan_of
from megazero.mpu.context import ParallelContext, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.group import Group, Work
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.traffic import TrafficLog, recording_context
from megazero.mpu.wrapping_group import GroupCall, WrappingGroup
from megazero.optim.elementwise import Adam
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from megazero.zero.bucket import ShardedState
from megazero.zero.build import build_store
from megazero.zero.delayed import DelayedUpdates
from megazero.zero.optimizer import Optimizer
from megazero.zero.parallel import DataParallel
from megazero.zero.policy import ZeroPolicy
from megazero.zero.store.device import DeviceStore
from megazero.zero.store.host import HostTier
from megazero.zero.store.offload import OffloadStore, StatePlacement
from megazero.zero.store.store import WEIGHT
from megazero.zero.unit import module_units
from tests.tables import over_table
from tests.zero.models import Zoo, zoo_loss
from tests.zero.policies import make_policy

WIDTH = 8
BUCKET = WIDTH * WIDTH


class Logged(WrappingGroup):
    """Writes down when a gather is started and when it is waited for, by the number of its start."""

    def __init__(self, inner: Group, events: list[str]):
        super().__init__(inner)
        self.events = events
        self.started = 0

    def _collective(self, call: GroupCall) -> Work:
        work = super()._collective(call)
        if call.operation != "all_gather":
            return work
        self.started += 1
        self.events.append(f"start {self.started}")
        return _LoggedWork(work, self.started, self.events)


class _LoggedWork(Work):
    def __init__(self, work: Work, number: int, events: list[str]):
        self.work, self.number, self.events = work, number, events

    def wait(self) -> None:
        self.events.append(f"wait {self.number}")
        self.work.wait()


def stack_events(*, late: bool, stage: int) -> list[str]:
    """What happens from an update to the end of the next forward, three layers with a bucket each."""
    events: list[str] = []
    context = recording_context(ProcessGrid(dp=2), 0, TrafficLog(), "cpu", seconds=["replica_gather"])
    logged = Logged(context.groups["replica_gather"], events)
    context = replace(context, groups={**context.groups, "replica_gather": logged})
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    policy = make_policy(stage, bucket_size=BUCKET)
    units = module_units(model)
    store = build_store(units, policy, context)
    parallel = DataParallel(units, store, policy, context, late=late)
    optimizer = Optimizer(store, Adam(), context, 1.0)
    for number, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda module, args, n=number: events.append(f"layer {n} begins"))
        layer.register_forward_hook(lambda module, args, output, n=number: events.append(f"layer {n} ends"))
    for step in range(2):
        parallel.start(step)
        if step:
            events.append("next step")
        loss = model(torch.ones(1, WIDTH)).sum()
        if step:
            break
        parallel.begin_backward(0, reduce=True)
        loss.backward()
        parallel.end_backward()
        parallel.finish()
        events.clear()
        assert optimizer.step(1e-3, 0.0).applied
    return events


@pytest.mark.parametrize("stage", [1, 2])
def test_gathers_start_in_the_order_of_forward_and_are_waited_for_layer_by_layer(stage):
    """The second layer's gather starts before the first layer's forward, and is waited for after its end."""
    assert stack_events(late=True, stage=stage) == [
        *("start 1", "start 2", "start 3"),
        "next step",
        *("wait 1", "layer 0 begins", "layer 0 ends"),
        *("wait 2", "layer 1 begins", "layer 1 ends"),
        *("wait 3", "layer 2 begins", "layer 2 ends"),
    ]


def test_an_update_waits_itself_where_nobody_else_would():
    layers = [f"layer {n} {what}" for n in range(3) for what in ("begins", "ends")]
    starts, waits = ([f"{what} {n}" for n in (1, 2, 3)] for what in ("start", "wait"))
    assert stack_events(late=False, stage=1) == [*starts, *waits, "next step", *layers]


def test_what_persists_at_stage_3_is_late_too():
    found = stack_events(late=True, stage=3)
    assert found == stack_events(late=True, stage=1)


class Posted(WrappingGroup):
    """Gathers what members hold when they ask for it, and writes to the output when that is waited for."""

    def _collective(self, call: GroupCall) -> Work:
        if not (call.async_op and call.operation == "all_gather"):
            return super()._collective(call)
        output, given = call.arguments
        brought = torch.empty_like(output)
        self.inner.all_gather(brought, given.clone()).wait()
        return _Delivery(output, brought)


class _Delivery(Work):
    def __init__(self, output: Tensor, brought: Tensor):
        self.output, self.brought = output, brought

    def wait(self) -> None:
        self.output.copy_(self.brought)


class Run:
    """The zoo on one rank, over a group of gathers that brings nothing before it is waited for."""

    def __init__(self, context: ParallelContext, stage: int, kind=DeviceStore, delayed: bool = False):
        gathers = Posted(context.groups["replica_gather"])
        context = replace(context, groups={**context.groups, "replica_gather": gathers})
        self.model, self.context = Zoo(), context
        policy = make_policy(stage, bucket_size=20)
        units = module_units(self.model)
        self.store = build_store(units, policy, context, kind=kind)
        self.parallel = DataParallel(units, self.store, policy, context, late=True)
        late = DelayedUpdates(self.store, 1) if delayed else None
        self.optimizer = Optimizer(self.store, Adam(eps=1e-3), context, 0.5, late)

    def loss(self, step: int) -> Tensor:
        return zoo_loss(self.model, step, self.context.rank)

    def step(self, number: int) -> float:
        self.parallel.start(number)
        loss = self.loss(number)
        self.parallel.begin_backward(0, reduce=True)
        loss.backward()
        self.parallel.end_backward()
        self.parallel.finish()
        self.optimizer.step(1e-2, 0.1, 1 / 2)
        return float(loss.detach())

    def pending(self) -> int:
        """How many buckets nobody has waited for."""
        return sum(bucket.presence is ShardedState.ARRIVING for bucket in self.store.buckets)


def on_host(policy: ZeroPolicy) -> OffloadStore:
    tier = HostTier()
    return OffloadStore(policy, StatePlacement(tier, tier))


def half_on_host(policy: ZeroPolicy) -> OffloadStore:
    tier = HostTier()
    return OffloadStore(policy, StatePlacement(tier, tier, fraction=0.5))


def zoo(work: Callable[[Run], object], stage: int = 1, **changes) -> list:
    """`work` with the zoo's run on each of two ranks."""
    world = ThreadWorld(2, timeout=20.0)

    def on(rank: int) -> object:
        context = thread_context(world, ProcessGrid(dp=2), rank, seconds=["replica_gather"])
        return work(Run(context, stage, **changes))

    return world.run(on)


def prompt(run: Run) -> Run:
    """The same run with updates that wait for their gathers."""
    for bucket in run.store.buckets:
        bucket.late = False
    return run


@over_table(
    ("stage", "changes"),
    [(1, {}), (2, {}), (3, {}), (1, {"kind": on_host}), (2, {"kind": on_host, "delayed": True})],
    ids=["1", "2", "3", "1 on the host", "2 delayed"],
)
def test_losses_are_those_of_updates_that_wait_bit_for_bit(stage, changes):
    """Tied, reused, unused and frozen parameters among them."""

    def late(run: Run) -> list[float]:
        losses = [run.step(number) for number in range(4)]
        assert run.pending() > 0
        return losses

    def waited(run: Run) -> list[float]:
        losses = [prompt(run).step(number) for number in range(4)]
        assert run.pending() == 0
        return losses

    assert zoo(late, stage, **changes) == zoo(waited, stage, **changes)


def weights(run: Run) -> list[list[float]]:
    return [param.detach().flatten().tolist() for param in run.model.parameters()]


@over_table(
    "read",
    [
        lambda run: weights(run) if run.parallel.gathered().__enter__() is None else None,
        lambda run: [flat.tolist() for b in run.store.buckets for flat in [b.weights_in_use()]],
        lambda run: [v.tolist() for b in run.store.buckets for v in run.store.at_rest(b).values()],
        lambda run: [
            loaded.bucket.full.tolist()
            for visit in run.store.stream((WEIGHT,), run.store.buckets)
            for loaded in visit
        ],
        lambda run: float(run.loss(9).detach()),  # an evaluation
    ],
    ids=["gathered", "in use", "at rest", "visit", "evaluation"],
)
@over_table("kind", [DeviceStore, on_host])
def test_whoever_reads_weights_after_an_update_reads_new_ones(read, kind):
    def late(run: Run) -> object:
        run.step(0)
        assert run.pending() > 0
        return read(run)

    def waited(run: Run) -> object:
        prompt(run).step(0)
        return read(run)

    assert zoo(late, kind=kind) == zoo(waited, kind=kind)


@pytest.mark.parametrize("kind", [DeviceStore, half_on_host])
def test_state_that_is_loaded_right_after_an_update_stays(kind):
    """As when a guard goes back: a gather that is on its way must not bring the old weights afterwards."""

    def back(run: Run) -> list[float]:
        held = [
            {kind: flat.clone() for kind, flat in run.store.at_rest(b).items()} for b in run.store.buckets
        ]
        losses = []
        for _ in range(2):
            losses.append(run.step(0))
            for bucket, state in zip(run.store.buckets, held, strict=True):
                for name, flat in run.store.at_rest(bucket).items():
                    flat.copy_(state[name])
            run.optimizer.publish()
        return losses

    for first, second in zoo(back, kind=kind):
        assert first == second


@pytest.mark.parametrize("kind", [DeviceStore, on_host])
def test_weights_in_use_that_are_written_right_after_an_update_stay(kind):
    """As when a run is resumed whose updates are delayed."""

    def work(run: Run) -> list[float]:
        run.step(0)
        trained = [bucket for bucket in run.store.buckets if bucket.key.trainable]
        for bucket in trained:
            bucket.weights_in_use().fill_(3.0)
        for bucket in trained:
            bucket.show_in_use()
        return [float(bucket.full.sum() / bucket.full.numel()) for bucket in trained if bucket.layout.numel]

    assert {mean for means in zoo(work, kind=kind) for mean in means} == {3.0}


def test_a_layer_that_no_forward_uses_does_not_hold_up_the_next_update():
    def work(run: Run) -> int:
        run.step(0)
        run.parallel.start(1)
        run.parallel.finish()  # no forward at all
        return run.pending()

    assert zoo(work) == [0, 0]


@over_table(
    ("flags", "expected"),
    [
        (["--zero-stage", "1"], ShardedState.ARRIVING),
        (["--zero-stage", "1", "--overlap-param-gather"], ShardedState.ARRIVING),
        (["--zero-stage", "2", "--no-overlap-param-gather"], ShardedState.WHOLE),
    ],
)
def test_a_training_gathers_late_unless_it_is_told_not_to(flags, expected):
    common = "--mock-data --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8"
    words = f"{common} --vocab-size 32 --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3"
    config = parse_config([*words.split(), *flags], world_size=2).config
    world = ThreadWorld(2, timeout=60.0)

    def on(rank: int) -> set[ShardedState]:
        context = thread_context(world, ProcessGrid(dp=2), rank)
        plan = training_plan_of(config, context.data.size)
        engine, first = verification_engine(config, plan, context), plan.at(Progress())
        engine.train_step(micro_batches(config, context, first), first.before, Timers())
        return {bucket.presence for bucket in engine.optimizer.store.buckets}

    assert world.run(on) == [{expected}, {expected}]
