"""A reward model as a judge: a model of its own on the layout of the training, which scores whole answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megazero.config.preference.rewards import RewardConfig
from megazero.config.rules.table import check
from megazero.config.tree.config import Config
from megazero.errors import CheckpointError, ConfigError
from megazero.models.classifier import SCORES, LastTokenClassifier
from megazero.mpu.context import ParallelContext
from megazero.post_training.policy.reference import evaluated, opened
from megazero.post_training.policy.rollout import Rollout, micro_batches
from megazero.post_training.scores import PairCollate, RewardLoss
from megazero.train.parts.vocabulary import Vocabulary, build_vocabulary
from megazero.train.resume.trained import load_chunks


@dataclass(frozen=True)
class RewardModel:
    """A model with one score for the last token of a row.

    Attributes:
        config: its configuration: its own model, on the layout and in the precision of the training.
        context: this rank's place.
        chunks: this rank's chunks, which no update reaches.
        collate: makes its micro-batches, of pairs of rows that need not belong together.
    """

    config: Config
    context: ParallelContext
    chunks: Mapping[int, LastTokenClassifier]
    collate: PairCollate

    @classmethod
    def load(cls, config: Config, vocabulary: Vocabulary, context: ParallelContext) -> RewardModel:
        """Load `--reward-model`; every rank calls this.

        Raises:
            CheckpointError: on every rank: it cannot be read, is no reward model, or has another vocabulary.
            ConfigError: its layers cannot be laid out as the training's.
        """
        folder = config.policy.reward_model
        assert folder is not None, "asked for where it is set"
        with opened(config, folder, context) as (saved, reader):
            model, length = saved.settings, config.model.seq_length
            kind = model.family, model.num_classes, model.classifier_bias
            if kind != (config.model.family, 1, False):
                raise CheckpointError(
                    "`reward_model` must be a decoder with one score, as `megazero finetune --task reward` "
                    f"trains, but {folder} holds another model; name a folder of one"
                )
            if (saved.vocab_size, max(length, model.seq_length)) != (vocabulary.size, model.seq_length):
                raise CheckpointError(
                    f"`reward_model` must have the vocabulary of the policy, {vocabulary.size} tokens, and "
                    f"take its {length} tokens, but {folder} has {saved.vocab_size} and takes "
                    f"{model.seq_length}; name another"
                )
            own, names = config.model, ("make_vocab_size_divisible_by", "pad_vocab_size_to")
            model = model.model_copy(update={name: getattr(own, name) for name in names})
            # Its layers are laid out as the policy's; the rules on a task of classifiers are not meant here.
            plain = model.model_copy(update={"num_classes": None, "classifier_bias": True})
            if not model.num_experts:  # beside a policy with experts
                dense = {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}
                config = config.model_copy(update={"parallel": config.parallel.model_copy(update=dense)})
            trunk = config.model_copy(update={"model": plain})
            if problems := check(trunk, context.world_size):
                raise ConfigError([f"the reward model of {folder} does not fit here: {p}" for p in problems])
            config = config.model_copy(update={"model": model})
            loaded = load_chunks(config, build_vocabulary(config), context, reader)
        chunks = {
            number: chunk.requires_grad_(False)
            for number, chunk in loaded.items()
            if isinstance(chunk, LastTokenClassifier)
        }
        collate = PairCollate.of(config, vocabulary.size, context, None)
        return cls(config, context, chunks, collate)

    def __call__(self, rollout: Rollout) -> tuple[np.ndarray, bool]:
        """The scores of this rank's answers, float64 [B] zeros elsewhere, and whether it speaks for them.

        Every rank calls this.
        """
        count, width = rollout.tokens.shape
        pairs = max(1, self.config.batch.micro_batch_size // 2)
        own, there = micro_batches(count, 2 * pairs, self.context.data)
        tokens = np.pad(rollout.tokens, ((0, 0), (0, self.config.model.seq_length - width)))
        made = []
        for rows in own.reshape(-1, pairs, 2):
            arrays = {"tokens": tokens[rows], "lengths": rollout.lengths[rows], "answers": 0 * rows}
            made.append(self.collate({**arrays, "margins": np.zeros(pairs, np.float32)}, tuple(range(pairs))))
        chunks = {number: RewardLoss(RewardConfig()).on_chunk(chunk) for number, chunk in self.chunks.items()}
        scores, spoke = np.zeros(count), False
        for number, output in evaluated(self.config, self.context, chunks, made).items():
            if SCORES in output:
                scores[own[number]], spoke = output[SCORES].cpu().numpy().ravel(), there
        leads = self.context.tp.rank == 0 and self.collate.columns.rank == 0
        return scores, leads and spoke
