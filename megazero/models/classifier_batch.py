"""One micro-batch of labelled samples: one sequence each, or one for each choice of a question."""

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
    RowPlace,
    column_multiple,
    documents_on,
    tensor_of,
)
from megazero.mpu.context import ParallelContext
from megazero.mpu.rng import sample_keys


@dataclass(frozen=True)
class LabelledBatch(MicroBatch):
    """A micro-batch of `n` samples in `b` rows of `s` tokens: `b` is `n` x the choices of a question.

    Rows end in padding, whose document id is -1, as no token may attend to it; there are no ids where none
    could. Token types are segments, and fine-tuning skips nothing.

    Attributes:
        pooled: int64 [b], the places of the tokens that speak for their rows, in hidden states [s, b, h]
            whose first two dims are flattened.
        labels: int64 [n]; -1 where it is not known, which does not count.
        known: how many labels are known.
        real: number of tokens, without padding.
    """

    of_sequences = MicroBatch.of_sequences | {"task", "accuracy"}

    pooled: Tensor
    labels: Tensor
    known: int
    real: int

    @property
    def counts(self) -> dict[str, float]:
        """The samples with a label, and the tokens and sequences to route."""
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
        vocab_size: number of ids that tokens may have.
        device: the device of the tensors.
        causal: whether attention is, so that the last token of a row speaks for it; otherwise the first does.
        marked: whether padding must be told from tokens; causal attention need not know, but experts must.
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
        """The collate function for a run's configuration."""
        marked = not causal or bool(config.model.num_experts)
        return cls(vocab_size, context.device, causal, marked, column_multiple(config), seed)

    def __call__(self, arrays: Mapping[str, np.ndarray], samples: tuple[RowPlace, ...]) -> LabelledBatch:
        """Make a batch of `tokens`, `token_types` [n, choices, T], `lengths` [n, choices] and `labels` [n].

        Nothing waits for the device.

        Args:
            arrays: the arrays, int64.
            samples: the places of the samples in the training order.

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


def _place_of_choice(sample: RowPlace, choices: int, choice: int) -> tuple[int, ...]:
    """The place of a choice in the training order, if each choice were a sample."""
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
