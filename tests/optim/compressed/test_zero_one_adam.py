"""0/1 Adam against its formula over replicas, its policies as literal lists, and what differs by replica."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megazero.errors import ConfigError
from megazero.mpu.context import solo_context
from megazero.mpu.grid import ProcessGrid
from megazero.optim.compressed.zero_one_adam import ZeroOneAdam, ZeroOneSteps
from megazero.zero.copies import CopyCheck
from tests.optim.compressed.reference import Mean
from tests.optim.compressed.training import DECAY, LR, SPECS, UNUSED, Run, on_ranks, values

# Exact in 1 2 4, exchanges at 7 8 (then every second one) 10 12.
RULE = ZeroOneAdam(ZeroOneSteps(6, 2, 2, 2), beta1=0.8, beta2=0.95, eps=1e-2)
STEPS = 12


def test_the_distance_of_variance_updates_doubles():
    """k_(j + 1) - k_j = 2^floor(j / kappa), as the paper has it, counted from 1."""
    rule = ZeroOneAdam(ZeroOneSteps(var_freeze_step=40, var_update_scaler=3))
    found = [step for step in range(1, 60) if rule.steps.updates_variance(step)]
    wanted = [1]
    while wanted[-1] + 2 ** ((len(wanted) - 1) // 3) <= 40:
        wanted.append(wanted[-1] + 2 ** ((len(wanted) - 1) // 3))
    assert found == wanted == [1, 2, 3, 4, 6, 8, 10, 14, 18, 22, 30, 38]


def test_the_distance_of_exchanges_doubles_up_to_its_bound():
    rule = ZeroOneAdam(ZeroOneSteps(var_freeze_step=10, local_step_scaler=4, local_step_clipper=4))
    alone = [step - 10 for step in range(11, 36) if rule.steps.exchanges(step)]
    assert alone == [1, 2, 3, 4, 6, 8, 12, 16, 20, 24]
    always = ZeroOneAdam(ZeroOneSteps(var_freeze_step=10, local_step_scaler=1, local_step_clipper=1))
    assert all(always.steps.exchanges(step) for step in range(11, 50))


def test_default_policies_after_a_million_steps_take_no_time():
    rule = ZeroOneAdam(ZeroOneSteps(var_freeze_step=100_000))
    assert [step for step in range(15, 22) if rule.steps.updates_variance(step)] == [15, 16, 17, 19, 21]
    assert [step for step in range(2_000_000, 2_000_020) if rule.steps.exchanges(step)] == [
        2_000_000,
        2_000_016,
    ]


def expected(rule: ZeroOneAdam, replicas: int, steps: int) -> dict[str, torch.Tensor]:
    """Masters and moments by the formula, in fp64; moments of replica 0."""
    found = {}
    for spec in SPECS:
        p, mean = values(spec, 0).double(), Mean()
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        own = [m] * replicas
        u, lr_sum, updates = [torch.zeros_like(p) for _ in range(replicas)], 0.0, 0
        decay = DECAY if spec.weight_decay else 0.0

        def averaged(each, v, updates, mean=mean, spec=spec):
            units = (v / (1 - rule.beta2**updates)).sqrt() + rule.eps if rule.precondition else None
            flat = None if units is None else units.reshape(-1)
            return mean([x.reshape(-1) for x in each], (v > 0).reshape(-1), flat).view(spec.shape)

        for t in range(1, steps + 1):
            parts = [replicas * values(spec, t, replica).double() for replica in range(replicas)]
            first = 1 - rule.beta1**t
            p = p * (1 - LR * decay)
            if t <= rule.steps.var_freeze_step:
                exact = rule.steps.updates_variance(t)
                updates += exact
                g = sum(parts) / replicas if exact else averaged(parts, v, updates)
                m = rule.beta1 * m + (1 - rule.beta1) * g
                v = rule.beta2 * v + (1 - rule.beta2) * g * g if exact else v
                own = [m] * replicas
            root = (v / (1 - rule.beta2**updates)).sqrt() + rule.eps
            if t <= rule.steps.var_freeze_step:
                p = p - LR * (m / first) / root
                continue
            if t == rule.steps.var_freeze_step + 1:
                mean.workers.clear()
                mean.server = None
            own = [
                torch.where(v > 0, rule.beta1 * m + (1 - rule.beta1) * part, 0.0)
                for m, part in zip(own, parts, strict=True)
            ]
            u = [u + LR / first * m for u, m in zip(u, own, strict=True)]
            lr_sum += LR / first
            if rule.steps.exchanges(t):
                both = averaged(u, v, updates)
                p, own = p - both / root, [both / lr_sum] * replicas
                u, lr_sum = [torch.zeros_like(p)] * replicas, 0.0
        found |= {f"{spec.name}/weight": p, f"{spec.name}/exp_avg": own[0], f"{spec.name}/exp_avg_sq": v}
        found[f"{spec.name}/local_update"] = u[0]
    return found


def assert_states(found, want) -> None:
    for name, tensor in want.items():
        torch.testing.assert_close(
            found[name].double(), tensor, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("precondition", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [6, 11, 12])
def test_it_is_its_formula(replicas, steps, precondition):
    rule = replace(RULE, precondition=precondition)
    found = on_ranks(
        ProcessGrid(dp=replicas), lambda context: Run(rule, context).train(range(1, steps + 1)).state()
    )
    assert_states(found[0], expected(rule, replicas, steps))


@pytest.mark.parametrize("bucket_size", [1, 1000])
@pytest.mark.parametrize("grid", [{"dp": 2, "tp": 2}, {"dp": 3, "tp": 4}], ids=str)
def test_layouts_with_as_many_replicas_agree(grid, bucket_size):
    found = on_ranks(
        ProcessGrid(**grid),
        lambda context: Run(RULE, context, bucket_size).train(range(1, STEPS + 1)).state(),
    )
    for each in found:
        assert_states(each, expected(RULE, grid["dp"], STEPS))


def test_masters_are_the_same_on_all_replicas_and_weights_in_use_after_exchanges():
    """Step 11 is one that replicas make alone."""

    def work(context):
        run = Run(RULE, context).train(range(1, 12))
        used = [param.detach().clone() for param in run.params]
        checked = CopyCheck(run.optimizer, context).compare().differences
        masters = run.state(["weight"])
        run.train([12])
        later = [param.detach().clone() for param in run.params]
        return used, checked, masters, later, run.state(["weight"])

    (one, checked, masters, together, after), (other, _, same, again, _) = on_ranks(ProcessGrid(dp=2), work)
    assert checked == ()
    assert all(masters[name].equal(same[name]) for name in masters)
    assert not one[0].equal(other[0])
    assert not one[0].equal(masters["columns/weight"])
    for mine, theirs, spec in zip(together, again, SPECS, strict=True):
        assert mine.equal(theirs)
        padded = spec.shard(after[f"{spec.name}/weight"], solo_context().place)
        assert mine.equal(padded)


def test_rows_that_never_had_a_gradient_stay_as_they_are():
    (found, *_) = on_ranks(ProcessGrid(dp=2, tp=4), lambda c: Run(RULE, c).train(range(1, 13)).state())
    weight = values(SPECS[1], 0)[UNUSED] * (1 - LR * DECAY) ** STEPS
    torch.testing.assert_close(found["words/weight"][UNUSED], weight)


@pytest.mark.parametrize("after", [2, 4, 10])
def test_a_gradient_that_is_not_finite_on_one_replica_changes_nothing_on_any(after):
    def work(context):
        run, clean = Run(RULE, context).train(range(1, after + 1)), Run(RULE, context)
        run.gather(50, poisoned=1)
        applied = run.optimizer.step(LR, DECAY).applied
        run.train(range(after + 1, 13))
        clean.train(range(1, 13))
        return applied, all(a.equal(b) for a, b in zip(run.flats(), clean.flats(), strict=True))

    assert on_ranks(ProcessGrid(dp=2), work) == [(False, True)] * 2


def test_a_learning_rate_of_zero_divides_by_nothing():
    """Two exchanges without a rate: what earlier ones left out may still arrive, but no more."""

    def work(context):
        run = Run(RULE, context).train(range(1, 8)).train(range(8, 11), lr=0.0)
        return [tensor.isfinite().all().item() for tensor in run.state().values()]

    assert all(map(all, on_ranks(ProcessGrid(dp=2), work)))


def test_a_policy_without_steps_is_refused():
    with pytest.raises(ConfigError, match="`local_step_clipper` must be at least 1, but is 0"):
        ZeroOneAdam(ZeroOneSteps(10, local_step_clipper=0))
