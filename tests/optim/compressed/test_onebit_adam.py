"""1-bit Adam against its formula over replicas, on other layouts, over the freeze, and with bad gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megazero.errors import ConfigError
from megazero.mpu.grid import ProcessGrid
from megazero.optim.compressed.onebit_adam import OnebitAdam
from megazero.optim.elementwise import Adam
from megazero.zero.copies import CopyCheck
from tests.optim.compressed.reference import Mean
from tests.optim.compressed.training import DECAY, LR, SPECS, UNUSED, Run, on_ranks, values

PRECONDITIONED = OnebitAdam(freeze_step=3, beta1=0.8, beta2=0.95, eps=1e-4)
RULE = replace(PRECONDITIONED, precondition=False)
EITHER = pytest.mark.parametrize("rule", [RULE, PRECONDITIONED], ids=["paper", "preconditioned"])
STEPS = 9


def expected(rule: OnebitAdam, replicas: int, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Weights and moments by the formula, in fp64."""
    found = {}
    for spec in SPECS:
        p, mean = values(spec, 0).double(), Mean()
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        decay = DECAY if spec.weight_decay else 0.0
        for t in range(1, steps + 1):
            # Replicas add up their parts.
            parts = [values(spec, t, replica).double() for replica in range(replicas)]
            if t <= rule.freeze_step:
                g = sum(parts)
                m = rule.beta1 * m + (1 - rule.beta1) * g
                v = rule.beta2 * v + (1 - rule.beta2) * g * g
            else:
                own = [rule.beta1 * m + (1 - rule.beta1) * replicas * part for part in parts]
                units = (v / (1 - rule.beta2**rule.freeze_step)).sqrt() + rule.eps
                m = mean(
                    [each.reshape(-1) for each in own],
                    (v > 0).reshape(-1),
                    units.reshape(-1) if rule.precondition else None,
                ).view(spec.shape)
            first, second = 1 - rule.beta1**t, 1 - rule.beta2 ** min(t, rule.freeze_step)
            p = p * (1 - LR * decay) - LR * (m / first) / ((v / second).sqrt() + rule.eps)
        found |= {f"{spec.name}/weight": p, f"{spec.name}/exp_avg": m, f"{spec.name}/exp_avg_sq": v}
    return found


def assert_states(found, want, **close) -> None:
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(
            found[name].double(), tensor.double(), **close, msg=lambda m, name=name: f"{name}: {m}"
        )


@EITHER
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_it_is_its_formula(replicas, rule):
    found = on_ranks(ProcessGrid(dp=replicas), lambda context: Run(rule, context).train(range(1, 10)).state())
    for each in found:
        assert_states(each, expected(rule, replicas), rtol=1e-5, atol=1e-5)
        assert all(each[name].equal(found[0][name]) for name in each), "replicas are the same bits"


@EITHER
@pytest.mark.parametrize("bucket_size", [1, 1000])
@pytest.mark.parametrize("grid", [{"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 3, "tp": 4}], ids=str)
def test_layouts_with_as_many_replicas_agree(grid, bucket_size, rule):
    """A scale is of a whole parameter, so neither slices nor buckets change it."""
    found = on_ranks(
        ProcessGrid(**grid),
        lambda context: Run(rule, context, bucket_size).train(range(1, 10)).state(),
    )
    for each in found:
        assert_states(each, expected(rule, grid["dp"]), rtol=1e-5, atol=1e-5)


def test_until_the_freeze_it_is_adam_bit_for_bit_with_clipping_by_the_exact_norm():
    def work(context):
        runs = [
            Run(rule, context, clip=0.5).train(range(1, 4))
            for rule in (Adam(0.8, 0.95, 1e-4), OnebitAdam(3, 0.8, 0.95, 1e-4))
        ]
        return [run.state() for run in runs]

    for adam, onebit in on_ranks(ProcessGrid(dp=2), work):
        assert all(adam[name].equal(onebit[name]) for name in adam)


def test_rows_that_never_had_a_gradient_stay_as_they_are():
    """One bit would move them by lr / eps, and padding too."""
    (found, *_) = on_ranks(ProcessGrid(dp=2, tp=4), lambda c: Run(RULE, c).train(range(1, 10)).state())
    weight = values(SPECS[1], 0)[UNUSED] * (1 - LR * DECAY) ** STEPS
    torch.testing.assert_close(found["words/weight"][UNUSED], weight)
    assert not found["words/exp_avg"][UNUSED].any()


def test_a_bit_moves_every_element_as_far_where_it_is_preconditioned():
    """By the scale of its parameter, whatever its second moment is; after the freeze without an error yet."""
    rule = replace(PRECONDITIONED, eps=1e-12)
    (run,) = on_ranks(ProcessGrid(dp=1), lambda context: Run(rule, context).train(range(1, 4)))
    before = run.state()
    after = run.train(range(4, 5)).state()
    moved = after["rows/weight"] - before["rows/weight"] * (1 - LR * DECAY)
    assert moved.abs().min() == pytest.approx(float(moved.abs().max()), rel=1e-3)


def test_without_an_exact_step_nothing_could_move_so_that_is_refused():
    with pytest.raises(ConfigError, match="`freeze_step` must be at least 1, but is 0"):
        OnebitAdam(freeze_step=0)
    assert OnebitAdam(freeze_step=1).sums_exactly(1)


@pytest.mark.parametrize("poisoned", [0, 2])
@pytest.mark.parametrize("after", [1, 5])
def test_a_gradient_that_is_not_finite_on_one_replica_changes_nothing_on_any(poisoned, after):
    """Neither weights nor errors: the run goes on as if the step had not been."""

    def work(context):
        run, clean = Run(RULE, context), Run(RULE, context)
        run.train(range(1, after + 1))
        before = run.flats()
        run.gather(50, poisoned)
        report = run.optimizer.step(LR, DECAY)
        unchanged = all(a.equal(b) for a, b in zip(before, run.flats(), strict=True))
        run.train(range(after + 1, 10))
        clean.train(range(1, 10))
        same = all(a.equal(b) for a, b in zip(run.flats(), clean.flats(), strict=True))
        return report.applied, report.first_bad_parameter, unchanged, same

    # An exact sum has brought it to all ranks.
    named = f"rows (rank {poisoned if after >= RULE.freeze_step else 0})"
    assert on_ranks(ProcessGrid(dp=3), work) == [(False, named, True, True)] * 3


def test_replicas_clip_by_one_estimate():
    """Nobody has the whole gradient then: the root mean square of the replicas' norms stands for its norm."""

    def work(context):
        run = Run(RULE, context, clip=0.5).train(range(1, 4))
        run.gather(4)
        report = run.optimizer.step(LR, DECAY)
        return report.grad_norm, run.state()

    found = on_ranks(ProcessGrid(dp=2), work)
    squares = [sum(float(values(s, 4, r).double().square().sum()) for s in SPECS) for r in range(2)]
    assert found[0][0] == found[1][0] == pytest.approx((4 * sum(squares) / 2) ** 0.5)
    assert all(found[0][1][name].equal(found[1][1][name]) for name in found[0][1])


def test_errors_are_no_differences_between_copies():
    def work(context):
        run = Run(RULE, context).train(range(1, 7))
        return CopyCheck(run.optimizer, context).compare().differences

    assert on_ranks(ProcessGrid(dp=2, tp=2), work) == [()] * 4
