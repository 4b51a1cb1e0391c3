"""The cost of a token: FLOPs of training on it, without what a step skips."""

from __future__ import annotations

from functools import cache

from megazero.config.tree import Config
from megazero.layers import Skipping
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
        embedding, *layers, head = self._blocks(sequence_length)
        total = embedding + head
        for layer, flops in enumerate(layers):
            kept = skipping.kept_by(layer, sequence_length)
            if kept < sequence_length:
                flops = self._blocks(kept)[1 + layer] * kept / sequence_length
            total += flops * (skipping.scale_of(layer) != 0.0)
        return 3.0 * total

    def _count(self, length: int) -> tuple[float, ...]:
        """FLOPs of the forward pass of each block: the embedding, the layers, the head."""
        model = self._config.model.model_copy(update={"seq_length": length})
        whole = self._config.model_copy(update={"model": model})
        blocks = family_of(model).blocks(whole, self._vocabulary.padded)
        return tuple(block.flops for block in blocks)
