"""Advantages and losses against the formulas of the papers, written out answer by answer in float64."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from megazero.config.policy.settings import PolicyConfig
from megazero.models.objective import AnswerBatch
from megazero.models.targets import Targets
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.thread_group import ThreadWorld
from megazero.post_training.policy.methods import (
    METHODS,
    Method,
    advantages,
    clipped_loss,
    divergence,
    equal_groups,
    weighted_sum,
)
from megazero.post_training.policy.objective import ANSWERS, KL, LOSS, PER_ROW, TOKENS, PolicyObjective

pytestmark = pytest.mark.fast
NAN = math.nan


def test_advantages_of_one_group():
    group = np.array([[1.0, 0.0, 0.0, 1.0]])
    std = math.sqrt(1 / 3)  # of a sample: over n - 1
    wanted = np.array([0.5, -0.5, -0.5, 0.5]) / (std + 1e-4)
    assert advantages(group, "group-std")[0] == pytest.approx(wanted, rel=1e-12)
    assert advantages(group, "group-mean")[0].tolist() == [0.5, -0.5, -0.5, 0.5]
    assert advantages(group, "leave-one-out")[0] == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    both = np.array([[1.0, 0.0], [3.0, 3.0]])
    whole = both.std(ddof=1) + 1e-4
    assert advantages(both, "batch-std") == pytest.approx(np.array([[0.5, -0.5], [0.0, 0.0]]) / whole)


@pytest.mark.parametrize("kind", ["group-std", "group-mean", "batch-std", "leave-one-out"])
def test_an_answer_without_a_reward_has_no_part_in_its_group(kind):
    group = advantages(np.array([[1.0, NAN, 0.0, 1.0]]), kind)[0]
    assert group[[0, 2, 3]] == pytest.approx(advantages(np.array([[1.0, 0.0, 1.0]]), kind)[0])
    assert group[1] == 0.0
    assert advantages(np.array([[NAN, 2.0], [NAN, NAN]]), kind).tolist() == [[0, 0], [0, 0]]  # trap 8
    assert not np.isnan(advantages(np.full((2, 3), 7.0), kind)).any()


def test_groups_that_teach_nothing():
    rewards = np.array([[1.0, 1.0], [1.0, 0.0], [NAN, 1.0], [NAN, NAN]])
    assert equal_groups(rewards).tolist() == [True, False, True, True]


def test_rewards_of_several_functions_are_summed_and_what_is_missing_is_left_out():
    rewards = np.array([[1.0, 2.0], [NAN, 3.0], [NAN, NAN], [300.0, 1e5]])
    assert weighted_sum(rewards, (0.5, 2.0))[:2].tolist() == [4.5, 6.0]
    assert np.isnan(weighted_sum(rewards, ())[2])
    assert weighted_sum(rewards, ())[3] == 100300.0  # trap 12: no 16 bits anywhere


def test_estimators_of_the_divergence():
    d = torch.tensor([-0.5, 0.0, 0.25], dtype=torch.float64)
    assert divergence("k1", d).tolist() == [-0.5, 0.0, 0.25]
    assert divergence("k2", d).tolist() == [0.125, 0.0, 0.03125]
    assert divergence("k3", d).tolist() == pytest.approx([math.e**0.5 - 1.5, 0.0, math.e**-0.25 - 0.75])


def test_any_setting_overrides_its_method():
    dapo = Method.of(PolicyConfig(policy_method="dapo", clip_low=0.1, aggregation="seq-mean-token-mean"))
    assert dapo == replace(METHODS["dapo"], clip_low=0.1, aggregation="seq-mean-token-mean")
    assert (dapo.clip_high, dapo.drop_equal_groups) == (0.28, True)


def written_out(method: Method, new, old, signs, lengths, longest) -> float:
    """The loss of a step over all answers, by loops over lists of each answer's tokens."""
    of_answers, sums, tokens = [], 0.0, 0
    for logs, before, sign, n in zip(new, old, signs, lengths, strict=True):
        gaps = [logs[t] - before[t] for t in range(n)]
        losses = []
        for t in range(n):
            if method.ratio_level == "token":
                ratio = math.exp(gaps[t])
            else:
                ratio = math.exp(sum(gaps) / (n if method.ratio_level == "sequence" else 1))
            bounded = min(max(ratio, 1 - method.clip_low), 1 + method.clip_high)
            loss = max(-ratio * sign, -bounded * sign)
            if method.dual_clip is not None and sign < 0:
                loss = min(loss, -method.dual_clip * sign)
            losses.append(loss)
        sums, tokens = sums + sum(losses), tokens + n
        share = n if method.aggregation == "seq-mean-token-mean" else longest
        of_answers.append(sum(losses) / share)
    return sums / tokens if method.aggregation == "token-mean" else sum(of_answers) / len(of_answers)


def answers(seed: int, count: int = 6, width: int = 9):
    rng = random.Random(seed)
    lengths = [rng.randint(1, width - 2) for _ in range(count)]
    old = [[rng.uniform(-4, 0) for _ in range(n)] for n in lengths]
    new = [[x + rng.gauss(0, 0.4) for x in row] for row in old]
    return new, old, [rng.gauss(0, 1) for _ in lengths], lengths


def batch_of(old, signs, lengths, width=9, dtype=torch.float64) -> tuple[AnswerBatch, torch.Tensor]:
    """A batch whose answers begin at different columns, and where those are, bool [b, s]."""
    b = len(lengths)
    mask = torch.zeros(b, width, dtype=torch.bool)
    logs = torch.full((b, width), -2.0, dtype=dtype)
    for row, n in enumerate(lengths):
        first = row % (width - n)
        mask[row, first : first + n] = True
        logs[row, first : first + n] = torch.tensor(old[row], dtype=dtype)
    zeros = {name: torch.zeros(b) for name, _ in PER_ROW}
    given = {
        **zeros,
        "answered": mask.to(dtype),
        "logs": logs,
        "answer_length": torch.tensor(lengths, dtype=dtype),
        "advantages": torch.tensor(signs, dtype=dtype),
    }
    labels = torch.zeros(b, width, dtype=torch.int64)
    targets = Targets(labels, mask.to(dtype), float(mask.sum()))
    divisors = {ANSWERS: float(b), TOKENS: float(sum(lengths))}
    return AnswerBatch(labels, targets, given=given, divisors=divisors), mask


CASES = [
    *METHODS.values(),
    replace(METHODS["grpo"], dual_clip=1.2),
    replace(METHODS["gspo"], aggregation="token-mean"),
    replace(METHODS["rloo"], aggregation="seq-mean-token-sum-norm"),
]


@pytest.mark.parametrize("method", CASES, ids=str)
def test_the_loss_is_the_formula_written_out(method):
    for seed in range(4):
        new, old, signs, lengths = answers(seed)
        batch, mask = batch_of(old, signs, lengths)
        logs = torch.randn(mask.shape, dtype=torch.float64)
        logs[mask] = torch.tensor([x for row in new for x in row], dtype=torch.float64)
        objective = PolicyObjective(method, longest=7)
        terms = objective(logs.t(), batch, SoloGroup("cp", 0))
        divisors = {term.name: batch.divisors[term.over] for term in objective.terms if term.trained}
        loss = float(terms[LOSS]) / divisors[LOSS]
        assert loss == pytest.approx(written_out(method, new, old, signs, lengths, 7), rel=1e-12)


@pytest.mark.parametrize("method", CASES, ids=str)
def test_micro_batches_and_shared_columns_add_up(method):
    """Traps 11 and 18: divisors are the step's, and a ratio of whole answers is of all their columns."""
    new, old, signs, lengths = answers(5)
    batch, mask = batch_of(old, signs, lengths)
    logs = torch.randn(mask.shape, dtype=torch.float64)
    logs[mask] = torch.tensor([x for row in new for x in row], dtype=torch.float64)
    objective = PolicyObjective(method, longest=7)
    whole = float(objective(logs.t(), batch, SoloGroup("cp", 0))[LOSS])

    def part(rows: slice, columns: slice, cp) -> float:
        given = {n: x[rows, columns] if x.dim() == 2 else x[rows] for n, x in batch.given.items()}
        targets = Targets(batch.tokens[rows, columns], batch.learnt.weights[rows, columns], 1.0)
        piece = AnswerBatch(batch.tokens[rows, columns], targets, given=given)
        return float(objective(logs[rows, columns].t(), piece, cp)[LOSS])

    everything, alone = slice(None), SoloGroup("cp", 0)
    by_rows = part(slice(0, 2), everything, alone) + part(slice(2, 6), everything, alone)
    assert by_rows == pytest.approx(whole, rel=1e-12)
    world = ThreadWorld(2)
    shares = world.run(
        lambda rank: part(everything, (slice(0, 4), slice(4, 9))[rank], world.group("cp", rank, range(2)))
    )
    assert sum(shares) == pytest.approx(whole, rel=1e-12)


def test_the_gradient_of_a_first_update_is_reinforce():
    """With a ratio of 1 the gradient of each token is -A / the divisor; columns of prompts have none."""
    _, old, signs, lengths = answers(2)
    batch, mask = batch_of(old, signs, lengths)
    logs = batch.given["logs"].clone().requires_grad_()
    loss = PolicyObjective(METHODS["dapo"])(logs.t(), batch, SoloGroup("cp", 0))[LOSS]
    (gradient,) = torch.autograd.grad(loss, logs)
    assert gradient[~mask].abs().max() == 0.0
    assert torch.allclose(gradient[mask], -batch.given["advantages"][:, None].expand_as(mask)[mask])


def test_the_divergence_is_aggregated_as_the_loss():
    _, old, signs, lengths = answers(3)
    batch, mask = batch_of(old, signs, lengths)
    reference = {"reference": batch.given["logs"] - 0.5 * mask}
    batch = replace(batch, given={**batch.given, **reference})
    objective = PolicyObjective(METHODS["grpo"], estimator="k2", kl_coef=0.1)
    terms = objective(batch.given["logs"].t(), batch, SoloGroup("cp", 0))
    assert float(terms[KL]) / batch.divisors[ANSWERS] == pytest.approx(0.125)
    (term,) = (term for term in objective.terms if term.name == KL)
    assert (term.coefficient, term.over) == (0.1, ANSWERS)


def test_clips_act_where_the_ratio_has_gone_too_far():
    method = Method(clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    ratios, sign = torch.tensor([0.5, 0.9, 1.2, 1.4, 9.0]).log(), torch.tensor(1.0)
    loss, clipped = clipped_loss(ratios, sign, method)
    assert loss.tolist() == pytest.approx([-0.5, -0.9, -1.2, -1.3, -1.3])
    assert clipped.tolist() == [False, False, False, True, True]
    loss, clipped = clipped_loss(ratios, -sign, method)
    assert loss.tolist() == pytest.approx([0.8, 0.9, 1.2, 1.4, 3.0])
    assert clipped.tolist() == [True, False, False, False, False]
