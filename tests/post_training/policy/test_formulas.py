"""What TRL (1.16) and verl (0.9.1) compute, by loops in float64, and which of it each of our rows is.

| ours | TRL | verl |
|---|---|---|
| group-std | `scale_rewards` group | `grpo`, with an epsilon of 1e-6; one alone in a group has its reward |
| group-mean | `scale_rewards` none | `grpo` without `norm_adv_by_std_in_grpo` |
| leave-one-out | RLOO | `rloo` |
| token ratio, clips | `grpo`, `dapo` | `vanilla`, whose dual clip (3) is on; log-ratios beyond 20 are cut |
| sequence ratio | `importance_sampling_level` sequence | `gspo` |
| token-mean | `dapo` | `token-mean` |
| seq-mean-token-mean | `grpo` | `seq-mean-token-mean` |
| seq-mean-token-sum-norm | `dr_grpo` | the same with `loss_scale_factor`, and `seq-mean-token-sum` times it |
| k1, k2, k3 | k3 | `kl`, `mse`, `low_var_kl`, which is cut beyond 20 and 10 |
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from megazero.mpu.solo_group import SoloGroup
from megazero.post_training.policy.methods import METHODS, Method, advantages, clipped_loss, divergence
from megazero.post_training.policy.objective import LOSS, PolicyObjective
from tests.post_training.policy.test_methods import answers, batch_of

pytestmark = pytest.mark.fast


def grpo_of(group: list[float], epsilon: float, *, scaled: bool = True) -> list[float]:
    """verl's and, by another epsilon, TRL's advantages of a group of two or more."""
    mean = sum(group) / len(group)
    std = math.sqrt(sum((x - mean) ** 2 for x in group) / (len(group) - 1))
    return [(x - mean) / (std + epsilon if scaled else 1.0) for x in group]


def test_advantages_are_trls_and_verls_of_another_epsilon():
    rng = random.Random(1)
    for size in (2, 3, 8):
        group = [rng.choice((0.0, 0.5, 1.0)) + rng.gauss(0, 0.01) for _ in range(size)]
        ours = advantages(np.array([group]), "group-std")[0].tolist()
        assert ours == pytest.approx(grpo_of(group, 1e-4), rel=1e-12)
        verl, std = grpo_of(group, 1e-6), float(np.std(group, ddof=1))
        assert [x * (std + 1e-4) / (std + 1e-6) for x in ours] == pytest.approx(verl, rel=1e-10)
        plain = advantages(np.array([group]), "group-mean")[0].tolist()
        assert plain == pytest.approx(grpo_of(group, 0.0, scaled=False), rel=1e-12)
        others = [x - (sum(group) - x) / (size - 1) for x in group]
        assert advantages(np.array([group]), "leave-one-out")[0].tolist() == pytest.approx(others, abs=1e-12)
    # Literals: the values 0, 0, 1 have the mean 1/3 and the standard deviation 3^-0.5.
    assert advantages(np.array([[0.0, 0.0, 1.0]]), "group-std")[0][2] == pytest.approx(1.1545004, rel=1e-6)
    assert grpo_of([0.0, 0.0, 1.0], 1e-6)[2] == pytest.approx(1.1546985, rel=1e-6)


def test_an_answer_alone_in_its_group_teaches_nothing_here():
    """In verl it has its reward as the advantage, mean 0 and deviation 1; in TRL 0, as here."""
    assert advantages(np.array([[0.7]]), "group-std").tolist() == [[0.0]]
    assert advantages(np.array([[0.7, math.nan]]), "group-std").tolist() == [[0.0, 0.0]]


def token_loss(log_ratio: float, advantage: float, low: float, high: float, c: float | None) -> float:
    """verl's `vanilla`; without `c` TRL's."""
    ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(loss, -advantage * c) if c is not None and advantage < 0 else loss


@pytest.mark.parametrize("c", [None, 3.0])
def test_token_losses_are_trls_and_with_a_dual_clip_verls(c):
    rng = random.Random(2)
    for name in ("grpo", "dapo"):
        method = replace(METHODS[name], dual_clip=c)
        for _ in range(200):
            gap, advantage = rng.gauss(0, 1.5), rng.gauss(0, 2)
            mine, _ = clipped_loss(*torch.tensor([gap, advantage], dtype=torch.float64), method)
            wanted = token_loss(gap, advantage, method.clip_low, method.clip_high, c)
            assert float(mine) == pytest.approx(wanted, rel=1e-12)
    assert token_loss(math.log(5.0), -1.0, 0.2, 0.2, None) == pytest.approx(5.0)
    assert token_loss(math.log(5.0), -1.0, 0.2, 0.2, 3.0) == 3.0


def aggregated(losses: list[list[float]], kind: str, factor: float) -> float:
    """verl's `agg_loss` of the losses of each answer's tokens."""
    sums = [sum(row) for row in losses]
    if kind == "token-mean":
        return sum(sums) / sum(len(row) for row in losses)
    if kind == "seq-mean-token-mean":
        return sum(total / len(row) for total, row in zip(sums, losses, strict=True)) / len(losses)
    return sum(sums) / len(losses) / (factor if kind == "seq-mean-token-sum-norm" else 1.0)


KINDS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_aggregations_are_verls(kind, level):
    """`seq-mean-token-sum` is none of ours: it is the one with a constant divisor times that."""
    new, old, signs, lengths = answers(11)
    ours = "seq-mean-token-sum-norm" if kind == "seq-mean-token-sum" else kind
    method = Method(aggregation=ours, ratio_level=level, dual_clip=3.0)
    batch, mask = batch_of(old, signs, lengths)
    logs = batch.given["logs"].clone()
    logs[mask] = torch.tensor([x for row in new for x in row], dtype=torch.float64)
    objective = PolicyObjective(method, longest=7)
    total = float(objective(logs.t(), batch, SoloGroup("cp", 0))[LOSS])
    loss = total / batch.divisors[objective.terms[0].over]
    losses = []
    for now, before, sign in zip(new, old, signs, strict=True):
        gaps = [a - b for a, b in zip(now, before, strict=True)]
        if level == "sequence":
            gaps = [sum(gaps) / len(gaps)] * len(gaps)
        losses.append([token_loss(gap, sign, 0.2, 0.2, 3.0) for gap in gaps])
    scale = 7 if kind == "seq-mean-token-sum" else 1
    assert loss * scale == pytest.approx(aggregated(losses, kind, 7), rel=1e-12)


def test_divergences_are_verls_where_its_clamps_do_not_act():
    """verl cuts d at 20 and k3 at 10; TRL cuts nothing, and neither do we."""

    def k3(d: float) -> float:
        inner = min(max(-d, -20.0), 20.0)
        return min(max(math.exp(inner) - inner - 1, -10.0), 10.0)

    for d in (-2.0, -0.3, 0.0, 0.7, 5.0, 9.0):
        tensor = torch.tensor(d, dtype=torch.float64)
        assert float(divergence("k3", tensor)) == pytest.approx(k3(d), rel=1e-12)
        assert float(divergence("k2", tensor)) == pytest.approx(0.5 * d * d)
        assert float(divergence("k1", tensor)) == d
    assert k3(-3.0) == 10.0
    assert float(divergence("k3", torch.tensor(-3.0, dtype=torch.float64))) == pytest.approx(math.exp(3) - 4)
