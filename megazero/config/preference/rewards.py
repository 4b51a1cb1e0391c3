"""The section `reward`: models that score answers, trained on pairs of them."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat

from megazero.config.condition import config, here
from megazero.config.tree.option import Section, option
from megazero.config.tree.roles import Role


class RewardConfig(Section):
    """Reward models"""

    needs = config.finetune.task == "reward"
    roles = Role.SCHEDULE

    reward_loss: Literal["pairwise", "per_token"] = option("pairwise")
    """loss of a pair: pairwise (Bradley and Terry, as TRL's), of the scores of both last tokens; per_token
    (as DeepSpeed-Chat's), the mean over tokens from the first that differs to the longer answer's end"""
    center_rewards_coefficient: NonNegativeFloat = option(
        0.0, needs=(config.finetune.task == "reward", here.reward_loss == "pairwise")
    )
    """pairwise: weight of the mean of (score of chosen + score of rejected)^2, which holds scores near 0;
    0.01 in its paper (Eisenstein et al. 2023)"""
