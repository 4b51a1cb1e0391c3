"""Losses over pairs of answers: direct preference optimization and its kin, as an `Objective`.

Each is a function of the log-ratios of the chosen and the rejected answer to the reference, sums over the
tokens of the answers (Rafailov et al. 2023, arXiv:2305.18290), or of their means over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megazero.config.preference.settings import PreferenceConfig
from megazero.loss import LossTerm
from megazero.models.objective import AnswerBatch, Objective, over_columns
from megazero.mpu.group import Group

PAIRS, CHOSEN_TOKENS = "pairs", "chosen_tokens"
"""Divisors: the number of pairs that count, and of the tokens of their chosen answers."""
REPORTED = tuple(
    LossTerm(f"rewards_{name}", 0.0, PAIRS) for name in ("chosen", "rejected", "accuracies", "margins")
)

Loss = Callable[[Tensor, Tensor, PreferenceConfig], Tensor]
"""(of chosen answers, of rejected answers, settings) -> the loss of each pair; all are [n]."""


def _sigmoid(chosen: Tensor, rejected: Tensor, settings: PreferenceConfig) -> Tensor:
    return -logsigmoid(settings.preference_beta * (chosen - rejected))


def _robust(chosen: Tensor, rejected: Tensor, settings: PreferenceConfig) -> Tensor:
    """The estimate of DPO's loss without the labels that are swapped (Chowdhury et al. 2024)."""
    scaled, swapped = settings.preference_beta * (chosen - rejected), settings.preference_label_smoothing
    return (swapped * logsigmoid(-scaled) - (1 - swapped) * logsigmoid(scaled)) / (1 - 2 * swapped)


def _ipo(chosen: Tensor, rejected: Tensor, settings: PreferenceConfig) -> Tensor:
    """The squared distance from a margin (Azar et al. 2023)."""
    return (chosen - rejected - 1 / (2 * settings.preference_beta)).square()


def _hinge(chosen: Tensor, rejected: Tensor, settings: PreferenceConfig) -> Tensor:
    """The hinge loss (Zhao et al. 2023, SLiC)."""
    return torch.relu(1 - settings.preference_beta * (chosen - rejected))


def _apo_zero(chosen: Tensor, rejected: Tensor, settings: PreferenceConfig) -> Tensor:
    """Chosen answers become likelier and rejected ones less likely (D'Oosterlinck et al. 2024)."""
    beta = settings.preference_beta
    return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)


def _simpo(chosen: Tensor, rejected: Tensor, settings: PreferenceConfig) -> Tensor:
    """A margin between mean log-probabilities (Meng et al. 2024)."""
    return -logsigmoid(settings.preference_beta * (chosen - rejected) - settings.simpo_gamma)


def _orpo(chosen: Tensor, rejected: Tensor, settings: PreferenceConfig) -> Tensor:
    """The ratio of odds, by mean log-probabilities (Hong et al. 2024)."""
    return -settings.preference_beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(logs: Tensor) -> Tensor:
    """log(p / (1 - p))."""
    return logs - torch.log(-torch.expm1(logs))


@dataclass(frozen=True)
class Kind:
    """A loss, and whether its arguments are means over tokens instead of sums."""

    loss: Loss
    means: bool = False


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "sigmoid": Kind(_sigmoid),
        "robust": Kind(_robust),
        "ipo": Kind(_ipo, means=True),
        "hinge": Kind(_hinge),
        "sigmoid_norm": Kind(_sigmoid, means=True),
        "apo_zero": Kind(_apo_zero),
        "simpo": Kind(_simpo, means=True),
        "orpo": Kind(_orpo, means=True),
    }
)
"""The losses by name."""


@dataclass(frozen=True)
class PreferenceLoss(Objective):
    """The loss of pairs; rows 2i and 2i + 1 of a batch are the chosen and the rejected answer of pair i.

    A batch gives `answers` [2n], the number of tokens of each answer (0: the pair does not count), and
    `reference` [2n], the sums of their log-probabilities by the reference model, 0 without one. Rewards are
    beta times what is compared with the reference, as in TRL: sums over tokens, or means without a reference.
    """

    settings: PreferenceConfig

    @property
    def sft_weight(self) -> float:
        """The weight of the likelihood of chosen answers."""
        settings = self.settings
        return 1.0 if settings.preference_loss == "orpo" else settings.preference_sft_coeff

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """The mean loss of pairs, that of the tokens of chosen answers, and what is only reported."""
        weight = self.sft_weight
        sft = (LossTerm("sft", weight, CHOSEN_TOKENS),) if weight else ()
        return (LossTerm("preference", over=PAIRS), *sft, *REPORTED)

    def __call__(self, logs: Tensor, batch: AnswerBatch, cp: Group) -> Mapping[str, Tensor]:
        """The sums of the terms over this micro-batch, shared by the ranks of `cp`."""
        kind, own = KINDS[self.settings.preference_loss], batch.learnt.weighted(logs)
        sizes, ratios = batch.given["answers"], over_columns(own, cp)
        if self.settings.has_reference:
            ratios = ratios - batch.given["reference"]
        counts, means = (sizes[0::2] > 0).to(logs.dtype) / cp.size, ratios / sizes.clamp(min=1)
        # Rows that count nothing have a mean of 0, whose odds are infinite.
        compared = torch.where(sizes > 0, means if kind.means else ratios, -1.0)
        losses = kind.loss(compared[0::2], compared[1::2], self.settings)
        shown = (ratios if self.settings.has_reference else means).detach()
        chosen, rejected = (self.settings.preference_beta * shown[side::2] for side in range(2))
        columns = {
            "preference": losses,
            "rewards_chosen": chosen,
            "rewards_rejected": rejected,
            "rewards_accuracies": (chosen > rejected).to(logs.dtype),
            "rewards_margins": chosen - rejected,
        }
        sums = {name: (values * counts).sum() for name, values in columns.items()}
        return {**sums, "sft": -own[:, 0::2].sum()} if self.sft_weight else sums
