"""Micro-batches of pairs of texts, without columns of padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megazero.config.tree.config import Config
from megazero.data.range_checks import check_token_ids
from megazero.models.batch import Batch, MicroBatch, Places, SampleIndex, column_multiple, tensor_of
from megazero.models.targets import Targets
from megazero.mpu.context import ParallelContext
from megazero.mpu.rng import sample_keys


@dataclass(frozen=True)
class PairBatch(MicroBatch):
    """A micro-batch of `b` pairs; `tokens` [b, s] are the encoder's.

    Attributes:
        decoder: the decoder's text [b, t]. In generation its `places` have the positions of new tokens.
        mask: bool [b, 1, 1, s], False for padding of the encoder's text; None without padding.
        read: number of tokens of both texts, without padding.
    """

    decoder: Batch
    mask: Tensor | None
    read: int

    @property
    def counts(self) -> dict[str, float]:
        """The weighted number of the decoder's positions, and the numbers of tokens and pairs."""
        pairs = float(len(self.tokens))
        return {
            "lm": self.decoder.learnt.count,
            "tokens": float(self.read),
            "sequences": pairs,
            "micro_batches": 1.0,
        }


@dataclass(frozen=True)
class PairCollate:
    """Turns a dataset's arrays into a `PairBatch`, trimming columns that hold only padding.

    Attributes:
        lengths: the most columns of the encoder's, and of the decoder's text.
        multiple: the number of columns is a multiple of this.
        seed: seed of the dropout streams; None for evaluation, which drops nothing.
    """

    vocab_size: int
    device: torch.device
    lengths: tuple[int, int]
    multiple: int
    seed: int | None = None

    @classmethod
    def of(cls, config: Config, vocab_size: int, context: ParallelContext, seed: int | None) -> PairCollate:
        """Make the collate function of a configuration."""
        lengths = config.model.seq_length, config.model.decoder_length
        return cls(vocab_size, context.device, lengths, column_multiple(config), seed)

    def __call__(self, arrays: Mapping[str, np.ndarray], samples: tuple[SampleIndex, ...]) -> PairBatch:
        """Make a batch, without waiting for the device; `samples` are positions in the training order.

        Raises:
            DataError: a token or label lies outside the vocabulary.
        """
        names = ("tokens", "decoder_tokens", "labels")
        check_token_ids({name: arrays[name] for name in names}, self.vocab_size)
        encoded, width = self._fitted(arrays["lengths"], 0)
        decoded, depth = self._fitted(arrays["decoder_lengths"], 1)
        real = np.arange(width) < encoded[:, None]
        loss_mask = arrays["loss_mask"][:, :depth] * (np.arange(depth) < decoded[:, None])
        keys = None if self.seed is None else sample_keys(self.seed, samples)
        targets = Targets(
            self._tensor(arrays["labels"][:, :depth]),
            self._tensor(loss_mask.astype(np.float32)),
            float(loss_mask.sum(dtype=np.float64)),
        )
        return PairBatch(
            self._tensor(arrays["tokens"][:, :width]),
            decoder=Batch(self._tensor(arrays["decoder_tokens"][:, :depth]), targets),
            mask=None if real.all() else self._tensor(real[:, None, None]),
            read=int(encoded.sum() + decoded.sum()),
            places=Places(sample_keys=None if keys is None else self._tensor(keys)),
        )

    def _fitted(self, lengths: np.ndarray, side: int) -> tuple[np.ndarray, int]:
        """The lengths of the encoder's (0) or the decoder's (1) texts, and how many columns they need."""
        lengths = np.minimum(lengths, self.lengths[side])
        needed = -(-int(lengths.max()) // self.multiple) * self.multiple
        return lengths, min(self.lengths[side], needed)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return tensor_of(array, self.device)


def random_pairs(rng: np.random.Generator, count: int, length: int, vocab_size: int) -> dict[str, np.ndarray]:
    """Arrays of `count` random pairs of uneven lengths, as a T5 dataset returns them; the first is longest.

    About 1 / (1 + i) of the decoder's positions of pair i have a loss.
    """
    shape, places = (count, length), np.arange(length)
    lengths, targets = rng.integers(min(4, length), length + 1, (2, count))
    lengths[0] = targets[0] = length
    text = rng.integers(0, vocab_size, (count, length + 1))
    real = places < targets[:, None]
    mask = (rng.random(shape) < 1.0 / (1 + np.arange(count))[:, None]) & real
    return {
        "tokens": np.where(places < lengths[:, None], rng.integers(0, vocab_size, shape), 0),
        "decoder_tokens": np.where(real, text[:, :-1], 0),
        "labels": np.where(real, text[:, 1:], 0),
        "loss_mask": mask.astype(np.float32),
        "lengths": lengths,
        "decoder_lengths": targets,
    }
