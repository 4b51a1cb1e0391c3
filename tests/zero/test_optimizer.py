"""The optimizer over shards: skipping, groups, narrow masters, and state that knows no layout."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.optim.elementwise import Adam, Sgd
from megazero.optim.lamb import Lamb
from megazero.optim.rule import Pieces
from megazero.zero.build import build_store
from megazero.zero.optimizer import Optimizer
from megazero.zero.parallel import DataParallel
from megazero.zero.policy import ZeroPolicy
from megazero.zero.table import STAGES
from megazero.zero.unit import module_units
from tests.tables import over_table
from tests.zero.harness import Trainer, assert_same, in_threads, serial
from tests.zero.models import Zoo, zoo_loss
from tests.zero.policies import make_policy

EVERY_STAGE = over_table("stage", range(len(STAGES)))
EVERY_RULE = over_table("rule", [Adam(eps=1e-3), Lamb(eps=1e-3)], ids=["adam", "lamb"])


def policy(stage: int, **changes) -> ZeroPolicy:
    return make_policy(stage, **{"persistence_threshold": 0, "max_live": 0, "bucket_size": 50, **changes})


def weights(trainer) -> dict[str, torch.Tensor]:
    return {spec.name: state["weight"].clone() for spec, state in trainer.optimizer.full_state()}


@EVERY_STAGE
@EVERY_RULE
@over_table("bad", [math.inf, math.nan])
@over_table("pp", [1, 2])
def test_what_is_not_finite_on_one_rank_skips_the_step_on_all(stage, bad, pp, rule):
    world = ThreadWorld(2 * pp, 20.0)

    def loss(model, step, sample):
        poison = bad if step == 0 and sample == 5 and model.last else 1.0
        return (model.scale * poison).sum() + zoo_loss(model, step, sample)

    def work(rank):
        context = thread_context(world, ProcessGrid(pp=pp, dp=2), rank)
        model = Zoo()
        model.scale, model.last = nn.Parameter(torch.ones(3)), context.pp.rank == pp - 1
        trainer = Trainer(model, loss, policy(stage), context, rule=rule)
        before = weights(trainer)
        trainer.accumulate(0, 2)
        report = trainer.optimizer.step(1e-2, 0.1)
        after = weights(trainer)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert trainer.optimizer.updates == 0
        trainer.accumulate(1, 2)  # and goes on
        assert trainer.optimizer.step(1e-2, 0.1).applied
        assert not torch.equal(weights(trainer)["scale"], before["scale"])
        return report

    reports = world.run(work)
    assert {report.applied for report in reports} == {False}
    names = {report.first_bad_parameter for report in reports}
    assert len(names) == 1
    assert names.pop().startswith("scale (rank ")


@EVERY_STAGE
def test_groups_have_their_own_rates(stage):
    def work(context):
        model = nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.fill_(1.0)
            model.bias.fill_(1.0)
        units = module_units(model)
        settings = policy(stage)
        store = build_store(units, settings, context, groups={id(model.bias): 1})
        parallel = DataParallel(units, store, settings, context)
        optimizer = Optimizer(store, Sgd(0.0), context, 0.0)
        parallel.start()
        loss = model(torch.ones(1, 3)).sum()
        parallel.begin_backward(0, reduce=True)
        loss.backward()
        parallel.end_backward()
        parallel.finish()
        optimizer.step([0.25, 0.5], [1.0, 0.0], 1 / context.replica.size)
        found = {spec.name: state["weight"].flatten().tolist() for spec, state in optimizer.full_state()}
        with parallel.gathered():
            assert model.bias.tolist() == found["bias"]
        return found

    # w (1 - lr decay) - lr g with g = 1
    expected = {"weight": [1.0 * (1 - 0.25) - 0.25] * 6, "bias": [1.0 - 0.5] * 2}
    assert in_threads(2, work) == [expected] * 2


@EVERY_STAGE
@EVERY_RULE
def test_state_moves_between_layouts(stage, rule):
    """Two steps on one layout and a third on another are three steps."""
    saved: dict[tuple[str, str], torch.Tensor] = {}

    def save(context):
        trainer = Trainer(Zoo(), zoo_loss, policy(stage), context, rule=rule)
        trainer.train(2)
        for spec, state in trainer.optimizer.full_state():
            if context.rank == 0:
                saved.update({(spec.name, kind): tensor.clone() for kind, tensor in state.items()})

    in_threads(3, save)
    assert {kind for _, kind in saved} == {"weight", "exp_avg", "exp_avg_sq"}
    assert ("frozen.weight", "weight") in saved
    assert ("frozen.weight", "exp_avg") not in saved

    def resume(other):
        def work(context):
            model = Zoo()
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()  # also what is frozen comes from the saved state
            trainer = Trainer(model, zoo_loss, policy(other, bucket_size=1), context, rule=rule)
            optimizer = trainer.optimizer
            kinds = ["weight", *optimizer.rule.state_names]
            optimizer.load(lambda spec, kind: saved[spec.name, kind], kinds)
            optimizer.publish()
            optimizer.updates = 2
            again = {(s.name, k): t.clone() for s, v in optimizer.full_state() for k, t in v.items()}
            assert again.keys() == saved.keys()
            assert all(torch.equal(again[key], saved[key]) for key in saved)
            trainer.accumulate(2, 2)
            optimizer.step(1e-2, 0.1, 1 / 12)
            return weights(trainer)

        return work

    expected = Trainer(Zoo(), zoo_loss, make_policy(), solo_context(), rule=rule).train(3).weights[-1]
    for other, size in ((3, 2), (2, 4), (0, 2)):
        for found in in_threads(size, resume(other)):
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


@EVERY_STAGE
def test_bf16_masters_move_in_fp32_and_are_rounded_once(stage):
    def work(context):
        model = nn.Linear(40, 1, bias=False).to(torch.bfloat16)
        with torch.no_grad():
            model.weight.copy_(torch.linspace(-1.0, 1.0, 40))
        units = module_units(model)
        settings = policy(stage, main_dtype=torch.bfloat16)
        store = build_store(units, settings, context)
        parallel = DataParallel(units, store, settings, context)
        optimizer = Optimizer(store, Adam(), context, 0.0)
        for _ in range(3):
            parallel.start()
            loss = model(torch.linspace(0.5, 2.0, 40, dtype=torch.bfloat16))
            parallel.begin_backward(0, reduce=True)
            loss.sum().backward()
            parallel.end_backward()
            parallel.finish()
            optimizer.step(1e-2, 0.1, 1 / context.replica.size)
        (_, state) = next(optimizer.full_state())
        return {kind: tensor.flatten() for kind, tensor in state.items()}

    want = torch.linspace(-1.0, 1.0, 40).to(torch.bfloat16)
    grad = torch.linspace(0.5, 2.0, 40, dtype=torch.bfloat16).float()
    rule = Adam()
    moments = rule.init_state(grad)
    for number in (1, 2, 3):
        wide = want.float()
        rule.step(Pieces([wide], [grad.clone()], [moments], [0.1], number), 1e-2)
        want = wide.to(torch.bfloat16)
    for found in in_threads(2, work):
        assert found["weight"].dtype == torch.bfloat16
        assert torch.equal(found["weight"], want)
        assert found["exp_avg"].dtype == torch.float32
        assert torch.equal(found["exp_avg"], moments["exp_avg"])


@EVERY_STAGE
def test_narrow_sums_are_clipped_in_fp32(stage):
    settings = policy(stage, accumulation_dtype=torch.bfloat16)
    expected = serial(Zoo, zoo_loss)
    for record in in_threads(2, lambda context: Trainer(Zoo(), zoo_loss, settings, context).train(3, 2)):
        for got, want in zip(record.norms, expected.norms, strict=True):
            assert got == pytest.approx(want, rel=2e-2)
        for name, value in expected.weights[-1].items():
            torch.testing.assert_close(record.weights[-1][name], value, rtol=0.0, atol=6e-3)


@EVERY_STAGE
@EVERY_RULE
@over_table("accumulation", [torch.float32, torch.bfloat16])
def test_after_a_step_gradients_are_those_that_it_used(stage, accumulation, rule):
    def work(context):
        settings = policy(stage, accumulation_dtype=accumulation)
        trainer = Trainer(Zoo(), zoo_loss, settings, context, rule=rule)
        trainer.accumulate(0, 1)
        norm = trainer.optimizer.step(1e-2, 0.1, 1 / 12).grad_norm
        return norm, trainer.optimizer.grad_norm()

    for before, after in in_threads(2, work):
        assert before > 0.6
        assert after == pytest.approx(0.5, rel=1e-2)  # clipped


@EVERY_STAGE
def test_norms_do_not_depend_on_the_layout(stage):
    def work(context):
        trainer = Trainer(Zoo(), zoo_loss, policy(stage), context)
        trainer.accumulate(0, 1)
        optimizer = trainer.optimizer
        return optimizer.grad_norm(), optimizer.measures.params_norm(), optimizer.measures.count_zero_grads()

    model = Zoo()
    sum(zoo_loss(model, 0, sample) for sample in range(12)).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    grad_norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    params_norm = math.sqrt(sum(float(p.detach().double().square().sum()) for p in trained))
    zeros = sum(int((g == 0).sum()) for g in grads)
    assert zeros >= 3
    for size in (1, 2, 3):
        for found in in_threads(size, work):
            assert found == (pytest.approx(grad_norm, rel=1e-5), pytest.approx(params_norm, rel=1e-6), zeros)


def test_a_serial_training_repeats_itself():
    assert_same(Trainer(Zoo(), zoo_loss, make_policy(), solo_context()).train(3, 3), serial(Zoo, zoo_loss))
