"""One micro-batch of labelled samples: one sequence per sample, or one for each choice of a question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megazero.config.tree.config import Config
from megazero.data.labelled.dataset import UNKNOWN_LABEL
from megazero.data.range_checks import check_token_ids
from megazero.models.batch import (
    COLUMNS,
    MicroBatch,
    Places,
    SampleIndex,
    column_multiple,
    documents_on,
    tensor_of,
)
from megazero.mpu.context import ParallelContext
from megazero.mpu.rng import sample_keys


@dataclass(frozen=True)
class LabelledBatch(MicroBatch):
    """A micro-batch of `n` samples in `b` rows of `s` tokens: `b` is `n` times the choices of a question.

    Rows end in padding. Its document id is -1, so that no token attends to it; causal attention needs no ids.
    Token types are segments.

    Attributes:
        pooled: int64 [b], the index of each row's pooled token in hidden states flattened from [s, b, h] to
            [s b, h].
        labels: int64 [n]; -1 if unknown, then the sample has no loss.
        known: number of known labels.
        real: number of tokens, without padding.
    """

    of_sequences = MicroBatch.of_sequences | {"task", "accuracy"}

    pooled: Tensor
    labels: Tensor
    known: int
    real: int

    @property
    def counts(self) -> dict[str, float]:
        """The numbers of samples with a label, of tokens and of sequences."""
        return {
            "task": float(self.known),
            "accuracy": float(self.known),
            "tokens": float(self.real),
            "sequences": float(len(self.tokens)),
            "micro_batches": 1.0,
        }


@dataclass(frozen=True)
class ClassifierCollate:
    """Turns the arrays of labelled samples into a `LabelledBatch`, without columns that hold only padding.

    Attributes:
        causal: whether attention is causal; then the last token of a row is pooled, otherwise the first.
        marked: whether padding needs document ids: for bidirectional attention, and for experts.
        multiple: the number of columns is a multiple of this.
        seed: seed of the dropout streams; None for evaluation, which drops nothing.
    """

    vocab_size: int
    device: torch.device
    causal: bool
    marked: bool
    multiple: int = COLUMNS
    seed: int | None = None

    @classmethod
    def of(
        cls, causal: bool, config: Config, vocab_size: int, context: ParallelContext, seed: int | None
    ) -> ClassifierCollate:
        """Make the collate function of a configuration."""
        marked = not causal or bool(config.model.num_experts)
        return cls(vocab_size, context.device, causal, marked, column_multiple(config), seed)

    def __call__(self, arrays: Mapping[str, np.ndarray], samples: tuple[SampleIndex, ...]) -> LabelledBatch:
        """Make a batch, without waiting for the device.

        Args:
            arrays: `tokens`, `token_types` [n, choices, T], `lengths` [n, choices], `labels` [n]; int64.
            samples: the position of each sample in the training order.

        Raises:
            DataError: a token lies outside the vocabulary.
        """
        check_token_ids({"tokens": arrays["tokens"]}, self.vocab_size)
        choices, capacity = arrays["tokens"].shape[1:]
        lengths = arrays["lengths"].reshape(-1)
        rows, width = lengths.size, min(capacity, -(-int(lengths.max()) // self.multiple) * self.multiple)
        pooled = np.arange(rows) + (rows * (lengths - 1) if self.causal else 0)
        documents = None
        if self.marked and int(lengths.min()) < width:
            documents = np.where(np.arange(width) < lengths[:, None], 0, -1).astype(np.int32)
        keys = None
        if self.seed is not None:
            paths = (_place_of_choice(s, choices, choice) for s in samples for choice in range(choices))
            keys = sample_keys(self.seed, paths)

        def tensor(array: np.ndarray) -> Tensor:
            return tensor_of(array, self.device)

        return LabelledBatch(
            tensor(arrays["tokens"].reshape(rows, capacity)[:, :width]),
            places=Places(
                token_types=tensor(arrays["token_types"].reshape(rows, capacity)[:, :width]),
                documents=documents_on(self.device, documents),
                sample_keys=None if keys is None else tensor(keys),
            ),
            pooled=tensor(pooled),
            labels=tensor(arrays["labels"]),
            known=int((arrays["labels"] != UNKNOWN_LABEL).sum()),
            real=int(lengths.sum()),
        )


def _place_of_choice(sample: SampleIndex, choices: int, choice: int) -> tuple[int, ...]:
    """The position that a choice would have in the training order if each choice were a sample."""
    position, *row = (sample,) if isinstance(sample, int) else sample
    return (position * choices + choice, *row)


def random_labelled(
    num_classes: int, rng: np.random.Generator, count: int, length: int, vocab_size: int
) -> dict[str, np.ndarray]:
    """Arrays of `count` random samples of uneven lengths; every fifth has no label.

    With one class, each sample is a question of three choices.
    """
    choices = 3 if num_classes == 1 else 1
    lengths = rng.integers(min(4, length), length + 1, (count, choices))
    lengths[0] = length
    real = np.arange(length) < lengths[..., None]
    labels = rng.integers(0, choices if num_classes == 1 else num_classes, count)
    labels[np.arange(count) % 5 == 4] = UNKNOWN_LABEL
    return {
        "tokens": np.where(real, rng.integers(0, vocab_size, (count, choices, length)), 0),
        "token_types": (real & (np.arange(length) >= lengths[..., None] // 2)).astype(np.int64),
        "lengths": lengths,
        "labels": labels,
    }
