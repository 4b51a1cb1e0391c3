"""The section `preference`: direct preference optimization (Rafailov et al. 2023) and its kin."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from megazero.config.condition import config, here
from megazero.config.tree.option import Section, option
from megazero.config.tree.roles import Role

WITHOUT_REFERENCE = ("simpo", "orpo")
"""Losses that compare answers without a reference model."""


class PreferenceConfig(Section):
    """Preferences"""

    needs = config.finetune.task == "preference"
    roles = Role.SCHEDULE

    preference_loss: Literal[
        "sigmoid", "robust", "ipo", "hinge", "sigmoid_norm", "apo_zero", "simpo", "orpo"
    ] = option("sigmoid")
    """loss of a pair of answers, by TRL's names: sigmoid (DPO), robust (to labels that are swapped), ipo,
    hinge, sigmoid_norm (means over tokens instead of sums), apo_zero; without a reference: simpo, orpo"""
    preference_beta: PositiveFloat = option(0.1)
    """how strongly answers are held to the reference's; for simpo the scale of the difference, 2 to 10 in its
    paper; for orpo the weight of the odds"""
    preference_label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = option(
        0.0,
        needs=(
            config.finetune.task == "preference",
            (here.preference_loss == "robust").because("other losses take labels as they are"),
        ),
    )
    """robust: share of the pairs whose labels are believed to be swapped"""
    preference_sft_coeff: NonNegativeFloat = option(
        0.0,
        needs=(
            config.finetune.task == "preference",
            here.preference_loss.among(
                "sigmoid", "robust", "ipo", "hinge", "sigmoid_norm", "apo_zero", "simpo"
            ).because("orpo has that term already"),
        ),
    )
    """weight of the negative log-likelihood of chosen answers, the mean over their tokens, beside the loss"""
    simpo_gamma: NonNegativeFloat = option(
        0.5, needs=(config.finetune.task == "preference", here.preference_loss == "simpo")
    )
    """simpo: the margin by which a chosen answer is to be better, in units of the scaled difference"""

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with a reference model."""
        return self.preference_loss not in WITHOUT_REFERENCE
