"""Post-training: from a configuration to a trained model."""

from __future__ import annotations

from megazero.checkpoint.disk import Disk
from megazero.config.tree.config import Config
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from megazero.mpu.launch import Launch
from megazero.post_training.chat import ChatTask
from megazero.post_training.preference import PreferenceTask
from megazero.post_training.task import completed
from megazero.train.assemble import assemble
from megazero.train.parts.vocabulary import build_vocabulary
from megazero.train.process import in_job
from megazero.train.step.state import TrainState


def post_train(config: Config, launch: Launch | None = None, disk: Disk | None = None) -> TrainState:
    """Train as configured, on this rank of the job.

    Args:
        launch: this rank's place in the job; by default, the launcher's environment says it.

    Raises:
        MegazeroError: something that the user has to fix prevents the run.
    """
    return in_job(config, launch, lambda joined: post_train_on(config, joined, read_task(config), disk))


def read_task(config: Config) -> ChatTask | PreferenceTask:
    """Read the files of the configured task.

    Raises:
        DataError: a file cannot be read, or holds nothing to train on.
    """
    if config.finetune.task == "chat":
        return ChatTask.read(config)
    if config.finetune.task == "preference":
        return PreferenceTask.read(config)
    raise ConfigError(f"`task` must be chat or preference here, but is {config.finetune.task}")


def post_train_on(
    config: Config, joined: ParallelContext, task: ChatTask | PreferenceTask, disk: Disk | None = None
) -> TrainState:
    """Train on a rank that has joined its job, such as a thread of a test.

    Args:
        task: what the files hold; this rank's own.

    Raises:
        MegazeroError: as `post_train`.
    """
    vocabulary = build_vocabulary(config)
    config = completed(config, task.splits, joined, **task.implied)
    return assemble(config, vocabulary, joined, task, disk).carry_out(task, disk)
