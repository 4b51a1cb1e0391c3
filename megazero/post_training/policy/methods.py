"""Methods of policy gradients as rows of a table: pure functions of rewards and log-probabilities.

Sources: GRPO (Shao et al. 2024, arXiv:2402.03300), Dr. GRPO (Liu et al. 2025, arXiv:2503.20783), DAPO (Yu et
al. 2025, arXiv:2503.14476), RLOO (Ahmadian et al. 2024, arXiv:2402.14740), GSPO (Zheng et al. 2025,
arXiv:2507.18071); the dual clip is of Ye et al. 2020 (arXiv:1912.09729). Estimators of the divergence: J.
Schulman, "Approximating KL Divergence", 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from megazero.config.policy.settings import Advantage, Aggregation, KlEstimator, PolicyConfig, RatioLevel

_EPSILON = 1e-4
"""Added to standard deviations, as in TRL and Megatron-LM."""


@dataclass(frozen=True)
class Method:
    """A method; what each attribute means is said by the setting of its name."""

    advantage: Advantage = "group-std"
    ratio_level: RatioLevel = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Aggregation = "seq-mean-token-mean"
    drop_equal_groups: bool = False
    dual_clip: float | None = None

    @classmethod
    def of(cls, policy: PolicyConfig) -> Method:
        """The method of the settings: the named row, with what is set by itself."""
        assert policy.policy_method is not None, "a run of `megazero rl` has a method"
        given = {field.name: getattr(policy, field.name) for field in fields(cls)}
        return replace(METHODS[policy.policy_method], **{k: v for k, v in given.items() if v is not None})


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "grpo": Method(),
        "dr-grpo": Method("group-mean", aggregation="seq-mean-token-sum-norm"),
        "dapo": Method(clip_high=0.28, aggregation="token-mean", drop_equal_groups=True),
        "rloo": Method("leave-one-out", "sequence-sum"),
        "gspo": Method(ratio_level="sequence", clip_low=3e-4, clip_high=4e-4),
    }
)


def advantages(rewards: np.ndarray, kind: Advantage) -> np.ndarray:
    """The advantage of each answer, float64 [prompts, group].

    Standard deviations are of samples (over n - 1), as in TRL and verl. An answer without a reward has
    advantage 0 and no part in the statistics; so has one that is alone with a reward in its group.

    Args:
        rewards: float64 [prompts, group]; NaN is no reward.
    """
    there, (centred, count) = ~np.isnan(rewards), _centred(rewards)
    if kind == "leave-one-out":
        return np.asarray(centred * count / np.maximum(count - 1, 1))
    if kind == "group-std":
        return np.asarray(centred / (deviations(rewards)[:, None] + _EPSILON))
    if kind == "batch-std" and there.sum() > 1:
        return np.asarray(centred / (rewards[there].std(ddof=1) + _EPSILON))
    return centred


def deviations(rewards: np.ndarray) -> np.ndarray:
    """The standard deviation of each group's rewards, float64 [prompts], 0 with fewer than two."""
    centred, count = _centred(rewards)
    return np.asarray(np.sqrt((centred**2).sum(1) / np.maximum(count[:, 0] - 1, 1)))


def _centred(rewards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rewards less the mean of their group, or 0 where there are not two; how many a group has, [n, 1]."""
    there = ~np.isnan(rewards)
    values, count = np.where(there, rewards, 0.0), there.sum(1, keepdims=True)
    mean = values.sum(1, keepdims=True) / np.maximum(count, 1)
    return np.where(there & (count > 1), values - mean, 0.0), count


def equal_groups(rewards: np.ndarray) -> np.ndarray:
    """Whether the rewards that there are in a group are all equal, bool [prompts]; rewards as above."""
    most = np.where(np.isnan(rewards), -np.inf, rewards).max(1)
    least = np.where(np.isnan(rewards), np.inf, rewards).min(1)
    return np.asarray(most <= least)


def weighted_sum(rewards: np.ndarray, weights: tuple[float, ...]) -> np.ndarray:
    """Rewards by several functions [answers, functions] as one, float64 [answers]; NaN where all are NaN."""
    scale = np.array(weights or (1.0,) * rewards.shape[1])
    whole = np.nansum(rewards * scale, axis=1)
    return np.where(np.isnan(rewards).all(1), np.nan, whole)


def clipped_loss(log_ratio: Tensor, advantage: Tensor, method: Method) -> tuple[Tensor, Tensor]:
    """The loss of each token and whether its clip acts, float32 and bool of the shape of `log_ratio`.

    The loss is -min(r A, clip(r) A); with a dual clip c, that of a negative advantage is at most -c A.
    """
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - method.clip_low, 1 + method.clip_high)
    loss = -torch.minimum(ratio * advantage, bounded * advantage)
    if method.dual_clip is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -method.dual_clip * advantage), loss)
    low = (ratio < 1 - method.clip_low) & (advantage < 0)
    high = (ratio > 1 + method.clip_high) & (advantage > 0)
    return loss, low | high


def divergence(estimator: KlEstimator, d: Tensor) -> Tensor:
    """An estimate of KL(policy || reference) for each token, of d = log policy - log reference."""
    if estimator == "k1":
        return d
    return d.square() / 2 if estimator == "k2" else torch.exp(-d) + d - 1
