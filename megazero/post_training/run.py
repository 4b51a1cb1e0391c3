"""Post-training: from a configuration to a trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from megazero.checkpoint.disk import Disk
from megazero.config.tree.config import Config
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from megazero.mpu.launch import Launch
from megazero.post_training.chat import ChatTask
from megazero.post_training.preference import PreferenceTask
from megazero.post_training.reward import RewardTask
from megazero.post_training.task import AnswerTask
from megazero.train.assemble import assemble
from megazero.train.parts.vocabulary import build_vocabulary
from megazero.train.process import in_job
from megazero.train.step.state import TrainState

_READ: Mapping[str, Callable[[Config], AnswerTask[Any]]] = MappingProxyType(
    {"chat": ChatTask.read, "preference": PreferenceTask.read, "reward": RewardTask.read}
)


def post_train(config: Config, launch: Launch | None = None, disk: Disk | None = None) -> TrainState:
    """Train as configured, on this rank of the job.

    Args:
        launch: this rank's place in the job; by default, the launcher's environment says it.

    Raises:
        MegazeroError: something that the user has to fix prevents the run.
    """
    return in_job(config, launch, lambda joined: post_train_on(config, joined, read_task(config), disk))


def read_task(config: Config) -> AnswerTask[Any]:
    """Read the files of the configured task.

    Raises:
        DataError: a file cannot be read, or holds nothing to train on.
    """
    name = config.finetune.task
    if name is None or name not in _READ:
        raise ConfigError(f"`task` must be one of {', '.join(_READ)} here, but is {name}")
    return _READ[name](config)


def post_train_on(
    config: Config, joined: ParallelContext, task: AnswerTask[Any], disk: Disk | None = None
) -> TrainState:
    """Train on a rank that has joined its job, such as a thread of a test.

    Args:
        task: what the files hold; this rank's own.

    Raises:
        MegazeroError: as `post_train`.
    """
    config = task.completed(config, joined)
    return assemble(config, build_vocabulary(config), joined, task, disk).carry_out(task, disk)
