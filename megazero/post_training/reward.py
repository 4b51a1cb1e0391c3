"""Reward models: from pairs of answers to a model that scores an answer."""

from __future__ import annotations

from megazero.config.tree.config import Config
from megazero.errors import ConfigError, DataError
from megazero.models.batch import Collate
from megazero.models.objective import LossChange
from megazero.mpu.context import ParallelContext
from megazero.post_training.files import read_splits
from megazero.post_training.scores import PairBatch, PairCollate, RewardLoss
from megazero.post_training.task import AnswerTask
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
        splits, read = read_splits(config)
        if config.reward.reward_loss == "per_token" and any(pairs.pairs.margins.any() for pairs in read):
            raise DataError(
                "`margin` must be left out of pairs with --reward-loss per_token, which has none, but is "
                "there; take pairwise."
            )
        return cls(splits)

    def implied(self, config: Config) -> Config:
        return with_score(config)

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


def with_score(config: Config) -> Config:
    """The configuration of a model with one score.

    Raises:
        ConfigError: another number of classes is given.
    """
    if config.model.num_classes not in (None, 1):
        raise ConfigError(
            f"`num_classes` must be 1 for a reward model, but is {config.model.num_classes}; leave it out"
        )
    model = config.model.model_copy(update={"num_classes": 1, "classifier_bias": False})
    return config.model_copy(update={"model": model})
