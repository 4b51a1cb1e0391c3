"""Post-training: from a configuration to a trained model."""

from __future__ import annotations

from megazero.config.tree.config import Config
from megazero.errors import ConfigError
from megazero.mpu.launch import Launch
from megazero.post_training.reward import reward_on
from megazero.train.process import in_job
from megazero.train.step.state import TrainState


def post_train(config: Config, launch: Launch | None = None) -> TrainState:
    """Train as configured, on this rank of the job.

    Raises:
        MegazeroError: something that the user has to fix prevents the run.
    """
    if config.finetune.task == "reward":
        return in_job(config, launch, lambda joined: reward_on(config, joined))
    raise ConfigError(f"`task` must be one of a labelled file here, but is {config.finetune.task}")
