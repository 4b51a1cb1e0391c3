"""Reward models: from pairs of answers to a model that scores an answer."""

from __future__ import annotations

from megazero.config.tree.config import Config
from megazero.data.preferences.dataset import PairSamples
from megazero.errors import ConfigError, DataError
from megazero.models.batch import Collate
from megazero.models.objective import LossChange
from megazero.mpu.context import ParallelContext
from megazero.post_training.files import encoder_of, read_pairs
from megazero.post_training.scores import PairBatch, PairCollate, RewardLoss
from megazero.post_training.task import AnswerTask, Splits
from megazero.train.finetuning.pretrained import take_pretrained
from megazero.train.step.engine import Engine


class RewardTask(AnswerTask[PairBatch]):
    """The task of training a model that scores answers, on pairs of them."""

    @classmethod
    def read(cls, config: Config) -> RewardTask:
        """Read the pairs of a run.

        Raises:
            DataError: a file is missing or unsuitable.
        """
        section, encoder, length = config.finetune, encoder_of(config), config.model.seq_length
        paths = (section.train_data if section.epochs else (), section.valid_data)
        train, valid = (
            PairSamples(read_pairs(named, encoder, length), length) if named else None for named in paths
        )
        read = [split for split in (train, valid) if split is not None]
        if config.reward.reward_loss == "per_token" and any(split.pairs.margins.any() for split in read):
            raise DataError(
                "`margin` must be left out of pairs with --reward-loss per_token, which has none, but is "
                "there; take pairwise."
            )
        return cls(Splits(train, valid, tuple(line for split in read for line in split.pairs.remarks)))

    def objective(self, config: Config) -> LossChange:
        return RewardLoss(config.reward)

    def collate(
        self, config: Config, vocab_size: int, context: ParallelContext, stream_seed: int | None
    ) -> Collate[PairBatch]:
        return PairCollate.of(config, vocab_size, context, stream_seed)

    def begin(
        self, config: Config, context: ParallelContext, vocab_size: int, engine: Engine
    ) -> tuple[str, ...]:
        return take_pretrained(config, context, vocab_size, engine)


def with_one_class(config: Config) -> Config:
    """The configuration of a model with one score.

    Raises:
        ConfigError: it has classes.
    """
    if config.model.num_classes not in (None, 1):
        raise ConfigError(
            f"`num_classes` must be 1 for a reward model, but is {config.model.num_classes}; leave it out"
        )
    model = config.model.model_copy(update={"num_classes": 1})
    return config.model_copy(update={"model": model})
