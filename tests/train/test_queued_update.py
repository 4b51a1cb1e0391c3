"""An update that the device decides about: queued before the host knows the losses, with the same bits."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks.launches import as_on_cuda
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.guards import GuardsConfig
from megazero.kernels.on_cpu import WatchedLibrary
from megazero.loss import LossTerm
from megazero.mpu.context import solo_context
from megazero.mpu.host import Reading
from megazero.optim.grad_norm import clip_coefficient, clipped_on_device
from megazero.train.guards.spike_guard import SpikeGuard
from megazero.train.loop import Loop
from megazero.train.step import losses
from megazero.train.step.engine import Engine, Outcome
from megazero.train.step.losses import Totals
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from tests.kernels.harness import library_path, same_bits
from tests.layouts.layout import Layout
from tests.tables import over_table

LAYOUTS = [
    {"clip": 0.5},
    {"clip": 0.0, "optimizer": "lion"},
    {"clip": 0.5, "dtype": "fp16"},
    {"clip": 0.5, "dtype": "bf16", "zero": 1, "method": ""},
    {"clip": 1e-3, "shape": "llama", "zero": 3, "optimizer": "sgd"},
]
STEPS = 4


def trained(spoilt: int | None, clip: float, **layout) -> tuple[list, dict, Engine]:
    """The results of some steps, the state after them, and the engine; the loss of one step is not finite."""
    config = Layout(micro_batch=2, samples=4, **layout).config()
    optimizer = config.optimizer.model_copy(update={"clip_grad": clip})
    config = config.model_copy(update={"optimizer": optimizer})
    plan = training_plan_of(config, 1)
    engine = verification_engine(config, plan, solo_context())
    results = []
    for number in range(STEPS):
        progress = plan.before(number)
        batches = micro_batches(config, engine.context, plan.at(progress))
        if number == spoilt:
            weight = next(iter(engine.optimizer.store.buckets)).full
            kept = weight[3].clone()
            weight[3] = torch.inf
        attempt = engine.attempt(batches, progress, Timers())
        if number == spoilt:
            weight[3] = kept
        engine.queue_update(attempt, progress)
        results.append(engine.update(attempt, progress, Timers()))
    state = {
        f"{spec.name}.{kind}": tensor.clone()
        for spec, kinds in engine.optimizer.full_state()
        for kind, tensor in kinds.items()
    }
    state |= {f"{spec.name}.grad": gradient for spec, gradient in engine.optimizer.full_gradients()}
    return results, state, engine


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("spoilt", [None, 1])
def test_the_device_decides_as_the_host_does(monkeypatch, layout, spoilt):
    """Weights, moments, gradients as used, and all that is reported, also of steps that are skipped."""
    with as_on_cuda(WatchedLibrary(library_path())):
        queued, state, engine = trained(spoilt, **layout)
        assert engine.optimizer.queues
        monkeypatch.setattr(Engine, "queue_update", lambda *_: None)
        known, expected, other = trained(spoilt, **layout)
    assert [repr(result) for result in queued] == [repr(result) for result in known]
    outcomes = {result.outcome for result in queued}
    assert (Outcome.NOT_FINITE in outcomes) == (spoilt is not None or layout.get("dtype") == "fp16")
    assert engine.optimizer.updates == other.optimizer.updates
    assert engine.scaler_state == other.scaler_state
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert same_bits(tensor, expected[name]), name


def events(monkeypatch, run) -> list[str]:
    """What a step of `run(engine, batches, progress)` does, in order: launches of the update, and reads."""
    order = []

    class Library(WatchedLibrary):
        def launch(self, name, *arguments):
            if name == "adam_update":
                order.append("update")
            super().launch(name, *arguments)

    class Seen(Reading):
        @property
        def values(self):
            order.append("read")
            return super().values

    monkeypatch.setattr(losses, "Reading", Seen)
    config = Layout(micro_batch=4, samples=4, bucket_size=10**6).config()
    plan = training_plan_of(config, 1)
    with as_on_cuda(Library(library_path())):
        engine = verification_engine(config, plan, solo_context())
        progress = plan.before(0)
        run(engine, micro_batches(config, engine.context, plan.at(progress)), progress)
    return list(dict.fromkeys(order))


def loop_of(engine: Engine, **guards) -> Loop:
    """The part of a loop that makes a step."""
    loop = object.__new__(Loop)
    loop.meters = SimpleNamespace(engine=engine, timers=Timers())
    loop.saving = None
    loop.guard = SpikeGuard(GuardsConfig(**guards), engine, None, None, None)
    return loop


def test_the_update_is_queued_before_the_host_waits(monkeypatch):
    assert events(monkeypatch, lambda engine, *rest: engine.train_step(*rest, Timers())) == ["update", "read"]


@pytest.mark.parametrize(
    ("guards", "first"),
    [
        ({"on_spike": "off"}, "update"),
        ({"on_spike": "warn"}, "update"),
        ({"on_spike": "skip"}, "read"),
        ({"on_spike": "rollback"}, "read"),
        ({"on_spike": "off", "rerun_on_fault": True}, "read"),
    ],
    ids=str,
)
def test_a_guard_that_may_hold_an_update_judges_first(monkeypatch, guards, first):
    def run(engine, batches, progress):
        step = SimpleNamespace(before=progress)
        state = SimpleNamespace(recent=None, updated=progress)
        loop_of(engine, **guards)._made(state, step, batches)

    assert events(monkeypatch, run)[0] == first


def test_on_the_host_nothing_is_queued():
    """There the kernels take the factor from the host alone."""
    _, _, engine = trained(None, 0.5)
    assert not engine.optimizer.queues


@over_table("norm", [0.0, 0.3, 0.5, 1.7, 1e30, torch.inf, torch.nan])
@over_table("most", [0.0, 0.5])
@over_table("scale", [1.0, 1 / 3, 2.0**-16])
def test_the_factor_has_the_bits_of_the_hosts(norm, most, scale):
    signals = clipped_on_device(torch.tensor(norm, dtype=torch.float64), most, scale)
    finite = math.isfinite(norm)
    assert signals.overflow.item() == (not finite)
    if finite:
        expected = torch.tensor(scale * clip_coefficient(norm, most), dtype=torch.float64).float()
        assert same_bits(signals.scale.view(1), expected.view(1))


@over_table(
    ("sums", "counts", "sound"),
    [
        ((6.0, 4.0, 1.0), (3.0, 2.0, 1.0), True),
        ((6.0, 0.0, 1.0), (3.0, 0.0, 1.0), True),
        ((0.0, 0.0, 5.0), (0.0, 0.0, 5.0), False),  # nothing to train on
        ((6.0, torch.inf, 1.0), (3.0, 2.0, 1.0), False),
        ((6.0, 4.0, torch.nan), (3.0, 2.0, 1.0), True),  # is only reported
        ((1e308, 1e308, 1.0), (1e-3, 1.0, 1.0), False),
    ],
)
def test_the_device_skips_what_the_host_skips(sums, counts, sound):
    terms = LossTerm("lm"), LossTerm("aux", coefficient=0.25), LossTerm("seen", coefficient=0.0)
    numbers = (torch.tensor(x, dtype=torch.float64) for x in (sums, counts, 9.0))
    totals = Totals(terms, *numbers)
    total = totals.losses.total
    assert (total is not None and math.isfinite(total)) == sound
    on_device = totals.norm_on_device()
    assert on_device.item() == totals.norm == 3.0 if sound else on_device.isnan()
