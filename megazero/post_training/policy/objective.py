"""`PolicyObjective`: the loss of policy gradients, and what a run reports of answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megazero.config.policy.settings import KlEstimator
from megazero.config.tree.config import Config
from megazero.loss import LossTerm
from megazero.models.objective import AnswerBatch, Objective, over_columns
from megazero.mpu.group import Group
from megazero.ops import native
from megazero.post_training.policy.methods import Method, clipped_loss, divergence

LOSS, KL, APART = "policy", "kl", "apart"
"""Terms: the loss, the divergence, and the share of tokens whose log-probability is not the rollout's."""
ANSWERS, TOKENS, ALL, ALL_TOKENS, REWARDED = (
    "answers", "answer_tokens", "all_answers", "all_answer_tokens", "rewarded"
)  # fmt: skip
"""Counts: answers that the loss counts and their tokens; all of them and theirs; those with a reward."""
PER_ROW = (("reward", REWARDED), ("reward_std", ALL), ("answer_length", ALL), ("truncated", ALL),
            ("equal_groups", ALL), ("failed_rewards", ALL), ("resampled", ALL),
            ("entropy", ALL_TOKENS))  # fmt: skip
"""What is reported of whole answers, and over which count its mean is."""
_FP32, _SLICED, _BF16, _ORDINARY = 2e-6, 2e-5, 1e-3, 1000.0


def invariant(config: Config) -> bool:
    """Whether products are computed batch-invariantly."""
    if config.policy.batch_invariant is not None:
        return config.policy.batch_invariant
    device = config.parallel.device
    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    return on_cpu and config.precision.dtype != "fp16" and native.available()


@dataclass(frozen=True)
class PolicyObjective(Objective):
    """The loss of a method.

    Attributes:
        method: advantage, ratio, clip and aggregation.
        temperature: divides the logits.
        longest: the most tokens of an answer, the constant divisor of sums over tokens.
        estimator: of the divergence; None without a reference.
        kl_coef: its weight in the loss.
        tolerance: beyond which a token's log-probability is apart from the rollout's, for those below -1 as a
            share of it.
    """

    method: Method
    temperature: float = 1.0
    longest: int = 1
    estimator: KlEstimator | None = None
    kl_coef: float = 0.0
    tolerance: float = _FP32

    @classmethod
    def of(cls, config: Config) -> PolicyObjective:
        """The objective of the settings."""
        policy = config.policy
        tolerance = policy.rollout_tolerance
        if tolerance is None:
            # Slices of the vocabulary are added in another order than the whole.
            exact = _FP32 if config.parallel.tensor_model_parallel_size == 1 else _SLICED
            exact = exact if config.precision.dtype == "fp32" else _BF16
            tolerance = exact if invariant(config) else exact * _ORDINARY
        return cls(
            Method.of(policy),
            policy.rollout_temperature,
            policy.max_answer_tokens,
            None if policy.kl_coef is None else policy.kl_estimator,
            (policy.kl_coef or 0.0) if policy.kl_in == "loss" else 0.0,
            tolerance,
        )

    @cached_property
    def terms(self) -> tuple[LossTerm, ...]:
        """The loss, the divergence if there is a reference, and what is only reported."""
        over = TOKENS if self.method.aggregation == "token-mean" else ANSWERS
        trained = [LossTerm(LOSS, over=over)]
        if self.estimator is not None:
            trained.append(LossTerm(KL, self.kl_coef, over))
        reported = (*PER_ROW, *((name, ALL_TOKENS) for name in ("clipped", "log_ratio", "surprisal", APART)))
        return (*trained, *(LossTerm(name, 0.0, over) for name, over in reported))

    def changed(self, logits: Tensor, batch: AnswerBatch, first: int) -> Tensor:
        """The logits at the temperature, without the tokens that the rollout did not draw among."""
        if self.temperature != 1.0:
            logits = logits.float() / self.temperature
        kept = batch.given.get("kept")
        if kept is None:
            return logits
        own = kept.transpose(0, 1) - first  # [s, b, k]; -1 before subtraction where there is none
        width = logits.shape[-1]
        inside = (own >= 0) & (own < width) & (kept.transpose(0, 1) >= 0)
        keep = torch.zeros(*logits.shape[:-1], width + 1, dtype=torch.bool, device=logits.device)
        keep.scatter_(-1, torch.where(inside, own, width), value=True)
        everything = (kept < 0).all(-1).t().unsqueeze(-1)
        return logits.masked_fill(~(keep[..., :width] | everything), torch.finfo(logits.dtype).min / 4)

    def __call__(self, logs: Tensor, batch: AnswerBatch, cp: Group) -> Mapping[str, Tensor]:
        """The sums of all terms; `given` has what `Cycle.batch` puts there."""
        given = batch.given
        answered, counts = given["answered"].t(), batch.learnt.weights
        assert counts is not None, "answers are a part of their sequences"
        counts = counts.t()
        difference = (logs - given["logs"].t()) * answered
        ratio = self._ratio(difference, given["answer_length"], cp)
        loss, clipped = clipped_loss(ratio, given["advantages"].expand_as(ratio), self.method)
        weights = counts * self._row_weights(given["answer_length"])
        terms = {LOSS: (loss * weights).sum()}
        if self.estimator is not None:
            apart = (logs - given["reference"].t()) * answered
            terms[KL] = (divergence(self.estimator, apart) * weights).sum()
        gap = difference.detach().abs()
        terms["clipped"] = (clipped * answered).sum()
        terms["log_ratio"] = gap.sum()
        terms["surprisal"] = -(logs.detach() * answered).sum()
        # Of a large number, the last bits are larger.
        terms[APART] = (gap > self.tolerance * logs.detach().abs().clamp(min=1)).float().sum()
        return {**terms, **{name: given[name].sum() / cp.size for name, _ in PER_ROW}}

    def _ratio(self, difference: Tensor, lengths: Tensor, cp: Group) -> Tensor:
        """The log-ratio that each token's loss is of, [s, b], from the differences of its own."""
        if self.method.ratio_level == "token":
            return difference
        sums = over_columns(difference, cp)
        ratio = sums / lengths if self.method.ratio_level == "sequence" else sums
        return ratio.expand_as(difference)

    def _row_weights(self, lengths: Tensor) -> Tensor:
        if self.method.aggregation == "token-mean":
            return torch.ones_like(lengths)
        if self.method.aggregation == "seq-mean-token-mean":
            return 1 / lengths
        return torch.full_like(lengths, 1 / self.longest)
