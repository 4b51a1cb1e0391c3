"""Trainings whose length is a number of passes over samples in memory."""

from __future__ import annotations

from collections.abc import Mapping

from megazero.config.rules.table import check
from megazero.config.tree.config import Config
from megazero.data.labelled.dataset import EpochOrder, EpochSamples
from megazero.data.sampler import BatchSampler, SamplerSpec
from megazero.errors import CheckpointError, ConfigError
from megazero.models.batch import Collate, M
from megazero.mpu.context import ParallelContext
from megazero.train.resume.resume import Resumed
from megazero.train.step.feed import Feed, make_feed


def over_epochs(
    config: Config, count: int | None, context: ParallelContext, **changes: Mapping[str, object]
) -> Config:
    """Complete a configuration by the data: global batch and length.

    Args:
        count: the number of training samples; None without training.
        changes: settings of other sections that the data tell, by the section's name.

    Raises:
        ConfigError: a rule does not allow the whole.
    """
    batch = config.batch.global_batch_size or config.batch.micro_batch_size * context.data.size
    steps = 1 if count is None else -(-count // batch)
    training = {
        "train_iters": steps * max(1, config.finetune.epochs),
        "eval_interval": steps,
        "skip_train": count is None,
    }
    sections = {**changes, "batch": {"global_batch_size": batch}, "training": training}
    complete = config.model_copy(
        update={name: getattr(config, name).model_copy(update=dict(own)) for name, own in sections.items()}
    )
    # Rules about the task apply to the user's own settings, and have been checked before.
    if violations := check(complete, context.world_size, {"finetune.task"}):
        raise ConfigError(violations)
    return complete


def feed_of(
    config: Config,
    context: ParallelContext,
    samples: EpochSamples,
    collate: Collate[M],
    stream_seed: int | None = None,
) -> Feed[M]:
    """Make a feed: with a stream seed all epochs, shuffled, else one in the files' order."""
    batch, trains = config.batch, stream_seed is not None
    assert batch.global_batch_size is not None, "`over_epochs` sets it"
    order = EpochOrder(
        samples,
        batch.global_batch_size,
        config.finetune.epochs if trains else 1,
        config.training.seed if trains else None,
    )
    spec = SamplerSpec(
        num_samples=len(order),
        micro_batch_size=batch.micro_batch_size,
        data_parallel_rank=context.data.rank,
        data_parallel_size=context.data.size,
    )
    return make_feed(order, BatchSampler(spec), collate, config.data.num_workers if trains else 0)


def check_batch(resumed: Resumed) -> None:
    """Refuse a new batch size, with which iterations would no longer be positions in an epoch.

    Raises:
        CheckpointError: it is not that of the steps that were made.
    """
    state, batch = resumed.state, resumed.config.batch.global_batch_size
    assert batch is not None, "`over_epochs` sets it"
    if state.consumed_samples != state.iteration * batch:
        raise CheckpointError(
            f"`global_batch_size` must stay {state.consumed_samples / state.iteration:g} until the last "
            f"epoch, but is {batch}; set it, or begin anew in another folder"
        )
