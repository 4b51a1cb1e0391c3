"""The cost of a token: FLOPs of training on it, without what a step skips."""

from __future__ import annotations

from functools import cache

from megazero.config.tree import Config
from megazero.layers import Skipping
from megazero.models import Block
from megazero.train.families import family_of
from megazero.train.vocabulary import Vocabulary


class TokenFlops:
    """FLOPs of forward and backward for one token, by the length of its sequence and what the step skips.

    Counts of `models/flops.py`. Each length is counted once.

    Args:
        config: the run's configuration.
        vocabulary: the vocabulary that the model's head predicts.
    """

    def __init__(self, config: Config, vocabulary: Vocabulary):
        self._config = config
        self._vocabulary = vocabulary
        self._blocks = cache(self._count)

    def __call__(self, sequence_length: int, skipping: Skipping) -> float:
        blocks = self._blocks(sequence_length)
        total = sum(block.flops for block in blocks if not isinstance(block.part, int))
        for number, block in enumerate(blocks):
            if not isinstance(block.part, int):
                continue
            flops, kept = block.flops, skipping.kept_by(block.part, sequence_length)
            if kept < sequence_length:
                flops = self._blocks(kept)[number].flops * kept / sequence_length
            total += flops * (skipping.scale_of(block.part) != 0.0)
        return 3.0 * total

    def _count(self, length: int) -> tuple[Block, ...]:
        """The blocks of a model of sequences of this length."""
        model = self._config.model.model_copy(update={"seq_length": length})
        whole = self._config.model_copy(update={"model": model})
        return family_of(model).blocks(whole, self._vocabulary.padded)
