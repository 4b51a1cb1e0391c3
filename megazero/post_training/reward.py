"""Reward models: from pairs of answers to a model that scores an answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from megazero.checkpoint.disk import Disk
from megazero.config.rules.table import check
from megazero.config.tree.config import Config
from megazero.data.labelled.dataset import EpochOrder
from megazero.data.preferences.dataset import PairSamples
from megazero.data.sampler import BatchSampler, SamplerSpec
from megazero.errors import CheckpointError, ConfigError, DataError
from megazero.models.objective import LossChange
from megazero.mpu.context import ParallelContext
from megazero.post_training.files import encoder_of, read_pairs
from megazero.post_training.scores import PairBatch, PairCollate, RewardLoss
from megazero.train.assemble import Run, TrainingTask, assemble
from megazero.train.finetuning.pretrained import take_pretrained
from megazero.train.guards.agreement import labelled_samples
from megazero.train.observe.evaluation import LossEvaluation, PeriodicEvaluation
from megazero.train.parts.vocabulary import Vocabulary, build_vocabulary
from megazero.train.resume.resume import Resumed
from megazero.train.step.engine import Engine
from megazero.train.step.feed import Feed, Feeds, make_feed
from megazero.train.step.state import TrainState


def reward_on(config: Config, joined: ParallelContext, disk: Disk | None = None) -> TrainState:
    """Train a reward model on a rank that has joined its job, such as a thread of a test.

    Raises:
        MegazeroError: something that the user has to fix prevents the run.
    """
    section, vocabulary = config.finetune, build_vocabulary(config)
    encoder, length = encoder_of(config), config.model.seq_length
    paths = (section.train_data if section.epochs else (), section.valid_data)
    splits = [PairSamples(read_pairs(files, encoder, length), length) if files else None for files in paths]
    if config.reward.reward_loss == "per_token" and any(s and s.pairs.margins.any() for s in splits):
        raise DataError(
            "`margin` must be left out of pairs with --reward-loss per_token, which has none, but is there; "
            "take pairwise."
        )
    task = Rewarding(*splits)
    config = completed(config, task, joined)
    return assemble(config, vocabulary, joined, task, disk).carry_out(task, disk)


def completed(config: Config, task: Rewarding, context: ParallelContext, classes: int | None = 1) -> Config:
    """Complete the configuration by the data: number of classes, global batch and length.

    Raises:
        ConfigError: a given setting contradicts the task.
    """
    if config.model.num_classes not in (None, classes):
        raise ConfigError(
            f"`num_classes` must be 1 for a reward model, but is {config.model.num_classes}; leave it out"
        )
    batch = config.batch.global_batch_size or config.batch.micro_batch_size * context.data.size
    steps, evaluated = (-(-len(split or ()) // batch) for split in (task.train, task.valid))
    training = {
        "train_iters": max(1, steps) * max(1, config.finetune.epochs),
        "eval_interval": max(1, steps),
        "eval_iters": evaluated,
        "eval_from_start": True,
        "skip_train": task.train is None,
    }
    sections = {
        "model": config.model.model_copy(update={"num_classes": classes}),
        "batch": config.batch.model_copy(update={"global_batch_size": batch}),
        "training": config.training.model_copy(update=training),
    }
    complete = config.model_copy(update=sections)
    # Rules about the task apply to the user's own settings, and have been checked before.
    if violations := check(complete, context.world_size, {"finetune.task"}):
        raise ConfigError(violations)
    return complete


class Rewarding(TrainingTask):
    """The task of training a reward model on pairs; `valid` is evaluated after each epoch."""

    def __init__(self, train: PairSamples | None, valid: PairSamples | None):
        self.train = train
        self.valid = valid

    def objective(self, config: Config) -> LossChange:
        return RewardLoss(config.reward)

    def begin(
        self, config: Config, context: ParallelContext, vocab_size: int, engine: Engine
    ) -> tuple[str, ...]:
        return take_pretrained(config, context, vocab_size, engine)

    def feeds(self, resumed: Resumed, vocabulary: Vocabulary, context: ParallelContext) -> Feeds:
        feed = partial(pair_feed, resumed.config, vocabulary.size, context)
        return Feeds(feed(self.train, resumed.stream_seed), feed(self.valid, None), None)

    def samples(self, config: Config, feeds: Feeds) -> Mapping[str, str]:
        return labelled_samples(config)

    def check(self, resumed: Resumed, feeds: Feeds) -> None:
        """Refuse a new batch size, with which iterations would no longer be positions in an epoch."""
        state, batch = resumed.state, resumed.config.batch.global_batch_size or 0
        if self.train is not None and state.consumed_samples != state.iteration * batch:
            raise CheckpointError(
                f"`global_batch_size` must stay {state.consumed_samples / state.iteration:g} until the last "
                f"epoch, but is {batch}; set it, or begin anew in another folder"
            )

    def remarks(self, run: Run) -> Iterable[str]:
        splits = (self.train, self.valid)
        return *(line for split in splits if split for line in split.pairs.remarks), *run.resumed.remarks

    def evaluations(self, run: Run, disk: Disk | None) -> PeriodicEvaluation:
        samples, timers = run.resumed.training_plan.evaluations, run.meters.timers
        evaluate = LossEvaluation(run.resumed.engine, run.feeds, samples, run.monitor, timers)
        there = {"validation"} if self.valid is not None else set[str]()
        return PeriodicEvaluation(evaluate, samples.interval, there)

    def conclude(self, run: Run, state: TrainState) -> None:
        """Do nothing: the last epoch ends the training."""

    def close(self) -> None:
        """Do nothing: the pairs are in memory."""


def pair_feed(
    config: Config,
    vocab_size: int,
    context: ParallelContext,
    samples: PairSamples | None,
    stream_seed: int | None,
) -> Feed[PairBatch] | None:
    """Make the feed of a split: with a stream seed all epochs, shuffled, else one in the files' order."""
    if samples is None:
        return None
    batch, trains = config.batch, stream_seed is not None
    assert batch.global_batch_size is not None, "`completed` sets it"
    epochs, seed = (config.finetune.epochs, config.training.seed) if trains else (1, None)
    order = EpochOrder(samples, batch.global_batch_size, epochs, seed)
    place = context.data.rank, context.data.size
    spec = SamplerSpec(len(order), batch.micro_batch_size, *place)
    collate = PairCollate.of(config, vocab_size, context, stream_seed)
    return make_feed(order, BatchSampler(spec), collate, config.data.num_workers if trains else 0)
