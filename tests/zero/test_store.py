"""Where state is between steps is a value: a store that puts all of it to sleep trains the same bits."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from megazero.checkpoint import parts_to_read, parts_to_write
from megazero.errors import ConfigError
from megazero.mpu import Matrices, solo_context
from megazero.optim import Adam, Muon
from megazero.zero import (
    GRADIENT,
    STAGES,
    WEIGHT,
    DeviceStore,
    DiskTier,
    HostTier,
    OffloadStore,
    Optimizer,
    StatePlacement,
    ZeroPolicy,
    build_store,
    module_units,
)
from megazero.zero.store.disk import DiskSettings
from tests.layers.live_bytes import LiveBytes
from tests.optim.rules import Lars, SelfSumming
from tests.zero.harness import Record, Trainer, in_threads
from tests.zero.late_group import with_late_groups
from tests.zero.models import Zoo, zoo_loss
from tests.zero.sleeping_store import SleepingStore

F32, BF16 = torch.float32, torch.bfloat16
EVERY_STAGE = pytest.mark.parametrize("stage", range(len(STAGES)))


def policy(stage: int, **changes) -> ZeroPolicy:
    return ZeroPolicy(stage, **{"persistence_threshold": 0, "max_live": 0, "bucket_size": 50, **changes})


def assert_equal(records: list[Record], others: list[Record]) -> None:
    """Two trainings agree in every bit."""
    for record, other in zip(records, others, strict=True):
        assert record.norms == other.norms
        for kind in ("gradients", "weights"):
            for found, wanted in zip(getattr(record, kind), getattr(other, kind), strict=True):
                assert found.keys() == wanted.keys()
                assert all(torch.equal(found[name], wanted[name]) for name in wanted), kind


def on_host(policy: ZeroPolicy) -> OffloadStore:
    """A store of everything on the host."""
    tier = HostTier()
    return OffloadStore(policy, StatePlacement(tier, tier, tier))


def on_disk(policy: ZeroPolicy) -> OffloadStore:
    """A store of everything in a file."""
    tier = DiskTier(Path(tempfile.gettempdir()), DiskSettings(block=8192))
    return OffloadStore(policy, StatePlacement(tier, tier, tier))


def on_both(policy: ZeroPolicy) -> OffloadStore:
    """Half of the state on disk, its gradients on the host, parameters on disk."""
    disk = DiskTier(Path(tempfile.gettempdir()))
    return OffloadStore(policy, StatePlacement(disk, HostTier(), disk, fraction=0.5))


def state_on_host(policy: ZeroPolicy) -> OffloadStore:
    """A store of masters and moments on the host, and of the rest on the device."""
    return OffloadStore(policy, StatePlacement(HostTier()))


STORES = (SleepingStore, on_host, on_disk, on_both, state_on_host)
EVERY_STORE = pytest.mark.parametrize("kind", STORES, ids=lambda kind: kind.__name__)

SETTINGS = {
    "plain": {},
    "one bucket": {"bucket_size": 10**9},
    "kept": {"persistence_threshold": 5, "max_live": 10**9},
    "narrow masters": {"main_dtype": BF16},
    "narrow sums": {"accumulation_dtype": BF16},
    "narrow wire": {"reduce_dtype": BF16},
    "sharded alone": {"shard_alone": True},
    "sharded alone, narrow wire": {"shard_alone": True, "reduce_dtype": BF16},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@EVERY_STAGE
def test_bucket_after_bucket_is_all_at_once(stage, settings):
    for size in (1, 2):
        wanted, *others = [
            in_threads(
                size,
                lambda context, k=kind: Trainer(
                    Zoo(), zoo_loss, policy(stage, **settings), with_late_groups(context), kind=k
                ).train(3, 2),
            )
            for kind in (DeviceStore, *STORES)
        ]
        for found in others:
            assert_equal(found, wanted)


def made_of_matrices() -> Zoo:
    """The zoo, whose parameters of two dims are matrices."""
    model = Zoo()
    module_units(model)  # gives parameters their specs
    for param in model.parameters():
        if param.dim() == 2:
            param.spec = replace(param.spec, matrices=Matrices())
    return model


@pytest.mark.parametrize(
    ("rule", "stages", "kinds"),
    [
        (Lars(), range(4), STORES),
        (SelfSumming(), range(1), (SleepingStore,)),
        (Muon(), range(4), STORES),
    ],
    ids=["Lars", "SelfSumming", "Muon"],
)
def test_rules_with_needs_can_be_visited_bucket_after_bucket(rule, stages, kinds):
    for stage in stages:
        needs = rule.needs
        settings = policy(stage, rule_reduces=needs.reduces, matrices_apart=needs.matrices)
        trained = [
            in_threads(
                2,
                lambda context, k=kind, s=settings: Trainer(
                    made_of_matrices(), zoo_loss, s, context, kind=k, rule=rule
                ).train(3),
            )
            for kind in (DeviceStore, *kinds)
        ]
        for found in trained[1:]:
            assert_equal(found, trained[0])


def test_a_rule_that_sums_gradients_itself_is_refused_with_state_elsewhere():
    with pytest.raises(ConfigError, match="must keep state on the device with SelfSumming"):
        Trainer(
            Zoo(), zoo_loss, policy(0, rule_reduces=True), solo_context(), kind=on_host, rule=SelfSumming()
        )


@EVERY_STORE
def test_a_second_partition(kind):
    def work(context, kind):
        return Trainer(Zoo(), zoo_loss, policy(3, hpz=2), context, kind=kind).train(3, 2)

    assert_equal(*(in_threads(4, lambda c, k=k: work(c, k), node_size=2) for k in (kind, DeviceStore)))


@EVERY_STORE
@EVERY_STAGE
def test_what_sleeps_is_saved_and_loaded(stage, kind):
    def work(context):
        trainers = [Trainer(Zoo(), zoo_loss, policy(stage), context, kind=k) for k in (kind, DeviceStore)]
        for trainer in trainers:
            trainer.train(1)
        saved = [parts_to_write(trainer.optimizer, context) for trainer in trainers]
        assert len(saved[0]) == len(saved[1]) > 0
        for part, other in zip(*saved, strict=True):
            assert (part.key, part.box) == (other.key, other.box)
            assert torch.equal(part.tensor, other.tensor)
        fresh = Trainer(Zoo(), zoo_loss, policy(stage), context, kind=kind)
        source = parts_to_read(trainers[1].optimizer, context)
        for part, other in zip(parts_to_read(fresh.optimizer, context), source, strict=True):
            part.tensor.copy_(other.tensor)
        fresh.optimizer.publish()
        fresh.optimizer.updates = 1
        return fresh.train(2), trainers[1].train(2)

    for resumed, wanted in in_threads(2, work):
        assert_equal([resumed], [wanted])


@EVERY_STORE
@EVERY_STAGE
def test_what_is_written_to_whole_weights_reaches_a_sleeping_master(stage, kind):
    def work(context):
        trainer = Trainer(Zoo(), zoo_loss, policy(stage), context, kind=kind)
        with trainer.parallel.gathered(write_back=True):
            for param in trainer.model.parameters():
                param.fill_(3.0)
        return {float(w) for _, state in trainer.optimizer.full_state() for w in state["weight"].unique()}

    assert in_threads(2, work) == [{3.0}] * 2


def test_asleep_is_out_of_reach():
    """The twin would notice a visit that forgot to say what it changes, or a tensor kept from one."""
    trainer = Trainer(Zoo(), zoo_loss, policy(0), solo_context(), kind=SleepingStore)
    trainer.train(1)
    store = trainer.store
    bucket = next(bucket for bucket in store.buckets if bucket.key.trainable)
    assert store.sums(bucket).isnan().all()
    for changes, wanted in (((), 1.0), ((WEIGHT,), 7.0)):
        store.asleep[bucket][WEIGHT].fill_(1.0)
        for residents in store.visits((WEIGHT, GRADIENT), [bucket], changes):
            (each,) = residents
            each.flats[WEIGHT].fill_(7.0)
        assert each.flats[WEIGHT].isnan().all()
        assert set(store.asleep[bucket][WEIGHT].tolist()) == {wanted}


class Peak(LiveBytes):
    """Also knows the most bytes that were alive at a time."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, self.total)
        return out


@pytest.mark.parametrize(
    ("main", "accumulation", "copies"), [(F32, F32, 0), (F32, BF16, 0), (BF16, F32, 1), (BF16, BF16, 1)]
)
def test_a_step_copies_what_is_narrow_bucket_by_bucket_and_nothing_else(main, accumulation, copies):
    """Of one bucket at a time the masters, where they are narrow, are there in fp32; gradients never."""
    size = 5000
    model = nn.ModuleList(nn.Linear(size, 1, bias=False) for _ in range(4)).to(BF16)
    settings = ZeroPolicy(bucket_size=size, main_dtype=main, accumulation_dtype=accumulation)
    store = build_store(module_units(model), settings, solo_context())
    optimizer = Optimizer(store, Adam(), solo_context(), 0.1)
    for bucket in store.buckets:
        store.sums(bucket).fill_(1.0)
    with Peak() as peak:
        report = optimizer.step(1e-2, 0.1)
    assert report.grad_norm == pytest.approx(math.sqrt(4 * size))
    # The norm of narrow sums is taken in fp64, of one at a time.
    norm = 8 * size if accumulation == BF16 else 0
    assert max(4 * size * copies, norm) <= peak.most < max(4 * size * copies, norm) + 2000
