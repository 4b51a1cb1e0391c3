"""1-bit LAMB against its formula over replicas, on other layouts, and with bad gradients."""

from __future__ import annotations

import pytest
import torch

from megazero.errors import ConfigError
from megazero.mpu.grid import ProcessGrid
from megazero.optim.compressed.onebit_lamb import OnebitLamb
from megazero.optim.lamb import Lamb
from megazero.zero.copies import CopyCheck
from tests.optim.compressed.reference import Mean
from tests.optim.compressed.training import DECAY, LR, SPECS, Run, on_ranks, values

BETAS = {"beta1": 0.8, "beta2": 0.95, "eps": 1e-2}
RULE = OnebitLamb(3, Lamb(**BETAS, adapt_all=True))
RULES = (
    RULE,
    OnebitLamb(2, Lamb(**BETAS, bias_correction="rate", max_coeff=0.3), 0.5, 0.8, 1.1, 0.5),
    OnebitLamb(4, Lamb(**BETAS, bias_correction="none"), factor_threshold=0.02),
)
STEPS = 9


def expected(rule: OnebitLamb, replicas: int, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Weights and moments by the formula, in fp64."""
    found, lamb = {}, rule.lamb
    for spec in SPECS:
        p, mean = values(spec, 0).double(), Mean()
        m, v, fresh = (torch.zeros_like(p) for _ in range(3))
        average, last = 0.0, 1.0
        decay = DECAY if spec.weight_decay else 0.0
        for t in range(1, steps + 1):
            parts = [values(spec, t, replica).double() for replica in range(replicas)]
            before, exact = m, t <= rule.freeze_step
            if exact:
                g = sum(parts)
                m = lamb.beta1 * m + (1 - lamb.beta1) * g
                v = fresh = lamb.beta2 * v + (1 - lamb.beta2) * g * g
            else:
                own = [lamb.beta1 * m + (1 - lamb.beta1) * replicas * part for part in parts]
                m = mean([each.reshape(-1) for each in own], (v > 0).reshape(-1)).view(spec.shape)
                g = (m - lamb.beta1 * before) / (1 - lamb.beta1)
                fresh = lamb.beta2 * fresh + (1 - lamb.beta2) * g * g
            first, second = 1 - lamb.beta1**t, 1 - lamb.beta2 ** min(t, rule.freeze_step)
            corrected = lamb.bias_correction == "moments"
            u = (m / (first if corrected else 1)) / ((v / (second if corrected else 1)).sqrt() + lamb.eps)
            whole = u + decay * p
            if exact:
                c = 1.0
                if whole.norm() > 0 and p.norm() > 0 and (spec.weight_decay or lamb.adapt_all):
                    c = min(max(float(p.norm() / whole.norm()), lamb.min_coeff), lamb.max_coeff)
                average = c if t == 1 else rule.coeff_beta * average + (1 - rule.coeff_beta) * c
            else:
                ratio = ((v.sqrt() + lamb.eps) / (fresh.sqrt() + lamb.eps))[v > 0]
                f = float(ratio.max()) if ratio.numel() else 0.0
                share = min(1.0, float(u.norm() / whole.norm())) if whole.norm() > 0 else 1.0
                f = f * share + 1 - share
                f = min(max(f, last * (1 - rule.factor_threshold)), last * (1 + rule.factor_threshold))
                last = min(max(f, rule.factor_min), rule.factor_max)
                c = average * last
            rate = LR * second**0.5 / first if lamb.bias_correction == "rate" else LR
            p = p - rate * c * whole
        found |= {f"{spec.name}/weight": p, f"{spec.name}/exp_avg": m, f"{spec.name}/exp_avg_sq": v}
    return found


def assert_states(found, want) -> None:
    for name, tensor in want.items():
        torch.testing.assert_close(
            found[name].double(), tensor, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("rule", RULES, ids=["plain", "DeepSpeed's", "bounds"])
def test_it_is_its_formula(rule, replicas):
    found = on_ranks(ProcessGrid(dp=replicas), lambda context: Run(rule, context).train(range(1, 10)).state())
    for each in found:
        assert_states(each, expected(rule, replicas))
        assert all(each[name].equal(found[0][name]) for name in each), "replicas are the same bits"


@pytest.mark.parametrize("bucket_size", [1, 1000])
@pytest.mark.parametrize("grid", [{"dp": 2, "tp": 2}, {"dp": 3, "tp": 4}], ids=str)
def test_layouts_with_as_many_replicas_agree(grid, bucket_size):
    def work(context):
        run = Run(RULE, context, bucket_size).train(range(1, 10))
        return run.state(), CopyCheck(run.optimizer, context).compare().differences

    for found, differences in on_ranks(ProcessGrid(**grid), work):
        assert_states(found, expected(RULE, grid["dp"]))
        assert differences == ()


def test_until_the_freeze_it_is_lamb_bit_for_bit():
    def work(context):
        return [
            Run(rule, context, clip=0.5).train(range(1, 4)).state(["weight"]) for rule in (RULE, RULE.lamb)
        ]

    for onebit, lamb in on_ranks(ProcessGrid(dp=2), work):
        assert all(lamb[name].equal(onebit[name]) for name in lamb)


@pytest.mark.parametrize("after", [2, 5])
def test_a_gradient_that_is_not_finite_on_one_replica_changes_nothing_on_any(after):
    def work(context):
        run, clean = Run(RULE, context).train(range(1, after + 1)), Run(RULE, context)
        run.gather(50, poisoned=1)
        applied = run.optimizer.step(LR, DECAY).applied
        run.train(range(after + 1, 10))
        clean.train(range(1, 10))
        return applied, all(a.equal(b) for a, b in zip(run.flats(), clean.flats(), strict=True))

    assert on_ranks(ProcessGrid(dp=2), work) == [(False, True)] * 2


def test_impossible_settings_are_refused():
    with pytest.raises(ConfigError, match="`freeze_step` must be at least 1"):
        OnebitLamb(0)
    with pytest.raises(ConfigError, match="`factor_min` must be above 0 and at most `factor_max`"):
        OnebitLamb(1, factor_min=2.0, factor_max=1.0)
