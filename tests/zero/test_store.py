"""Where state is between steps is a value: a store that puts all of it to sleep trains the same bits."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from megazero.checkpoint.shards import parts_to_read, parts_to_write
from megazero.errors import ConfigError
from megazero.mpu.context import solo_context
from megazero.mpu.matrices import Matrices
from megazero.optim.elementwise import Adam
from megazero.optim.muon import Muon
from megazero.zero.build import build_store
from megazero.zero.optimizer import Optimizer
from megazero.zero.policy import ZeroPolicy
from megazero.zero.store.device import DeviceStore
from megazero.zero.store.disk import DiskSettings, DiskTier
from megazero.zero.store.host import HostTier
from megazero.zero.store.offload import OffloadStore, StatePlacement
from megazero.zero.store.store import GRADIENT, WEIGHT
from megazero.zero.table import STAGES
from megazero.zero.unit import module_units
from tests.layers.live_bytes import LiveBytes
from tests.optim.rules import Lars, SelfSumming
from tests.zero.harness import Record, Trainer, in_threads
from tests.zero.late_group import with_late_groups
from tests.zero.models import Zoo, zoo_loss
from tests.zero.policies import make_policy
from tests.zero.sleeping_store import SleepingStore

F32, BF16 = torch.float32, torch.bfloat16
EVERY_STAGE = pytest.mark.parametrize("stage", range(len(STAGES)))


def policy(stage: int, **changes) -> ZeroPolicy:
    return make_policy(stage, **{"persistence_threshold": 0, "max_live": 0, "bucket_size": 50, **changes})


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
        settings = policy(stage, needs=rule.needs)
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
    settings = policy(0, needs=SelfSumming.needs)
    with pytest.raises(ConfigError, match="must keep state on the device with SelfSumming"):
        Trainer(Zoo(), zoo_loss, settings, solo_context(), kind=on_host, rule=SelfSumming())


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
        store.offloaded[bucket][WEIGHT].fill_(1.0)
        for loaded_buckets in store.stream((WEIGHT, GRADIENT), [bucket], changes):
            (each,) = loaded_buckets
            each.flats[WEIGHT].fill_(7.0)
        assert each.flats[WEIGHT].isnan().all()
        assert set(store.offloaded[bucket][WEIGHT].tolist()) == {wanted}


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
    settings = make_policy(bucket_size=size, main_dtype=main, accumulation_dtype=accumulation)
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


@dataclass(frozen=True)
class Watching(Adam):
    """Adam that notes what it is given: scale, dtypes of the gradients, and of the weights to write."""

    seen: list = field(default_factory=list)

    def step(self, pieces, lr):
        self.seen.append((pieces.scale, [g.dtype for g in pieces.grads], [w.dtype for w in pieces.weights]))
        super().step(pieces, lr)


class Puts(HostTier):
    """Knows which of its content was put back."""

    def __init__(self):
        super().__init__()
        self.put_back = []

    def put(self, slot, content):
        self.put_back.append(content)
        super().put(slot, content)


@pytest.mark.parametrize(
    "kind", [DeviceStore, on_host, on_disk, state_on_host], ids=lambda kind: kind.__name__
)
@EVERY_STAGE
def test_a_rule_gets_sums_as_they_are_stored_and_writes_the_weights_itself(stage, kind):
    """No pass over memory goes before or after the rule's: scaling, widening, rounding, copying back."""
    model = nn.ModuleList(nn.Linear(64, 3) for _ in range(4)).to(BF16)
    settings = policy(stage, accumulation_dtype=BF16, shard_alone=True)
    rule = Watching()
    seen = rule.seen
    trainer = Trainer(
        model,
        lambda m, step, i: sum(part(torch.ones(64, dtype=BF16)).sum() * i for part in m).float(),
        settings,
        solo_context(),
        kind=kind,
        rule=rule,
    )
    trainer.accumulate(0, 1)
    stored = {s.name: g.clone() for s, g in trainer.optimizer.full_gradients()}
    report = trainer.optimizer.step(1e-2, 0.1, 0.25)
    factor = 0.25 * 0.5 / report.grad_norm
    assert {dtype for _, *kinds in seen for dtypes in kinds for dtype in dtypes} == {BF16}
    assert [scale for scale, *_ in seen] == pytest.approx([factor] * len(seen), rel=1e-4)
    used = {s.name: g for s, g in trainer.optimizer.full_gradients()}
    assert all(torch.equal(used[name], stored[name] * seen[0][0]) for name in stored)
    trainer.accumulate(1, 1)  # new sums have not been used
    assert trainer.optimizer.grad_norm() > 1.0
    with trainer.parallel.gathered():
        masters = {s.name: state["weight"].clone() for s, state in trainer.optimizer.full_state()}
        for name, param in model.named_parameters():
            assert torch.equal(param, masters[name].to(BF16)), name


def test_an_update_writes_no_gradients_to_their_tier():
    tier = Puts()
    kind = lambda policy: OffloadStore(policy, StatePlacement(tier, tier, tier))  # noqa: E731
    trainer = Trainer(Zoo(), zoo_loss, policy(3), solo_context(), kind=kind)
    trainer.accumulate(0, 1)
    tier.put_back.clear()
    trainer.optimizer.step(1e-2, 0.1)
    buckets = [bucket for bucket in trainer.store.buckets if bucket.key.trainable]
    assert len(tier.put_back) == 3 * len(buckets)  # the masters, which are the weights, and two moments
