"""One micro-batch of text: arrays of a dataset as tensors on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from megazero.config.tree import Config
from megazero.data import check_token_ids
from megazero.layers import NOTHING_SKIPPED, Skipping
from megazero.mpu import sample_keys
from megazero.ops.positions import Positions


@dataclass(frozen=True)
class Batch:
    """One micro-batch of `b` sequences of `s` tokens.

    Attributes:
        tokens: int64 [b, s].
        labels: int64 [b, s], the token that follows each position; None when generating.
        loss_mask: float32 [b, s], weight of each position in the loss; None counts every position.
        counted: the mask's sum, known on the host; given if and only if there is a mask.
        position_ids: int64 [b, s] or [s], the positions to embed; None means `positions`.
        document_ids: int32 [b, s]; positions attend only within equal ids. None: to all earlier positions.
        sample_keys: int64 [b], the keys of the samples' random streams; None turns dropout off.
        positions: positions of the columns in their sequences: a range, or int64 [s] or [b, s]; None means
            from 0.
        skipping: what the step leaves out of its layers.
        token_types: None, as all tokens are of one kind.
    """

    tokens: Tensor
    labels: Tensor | None = None
    loss_mask: Tensor | None = None
    counted: float | None = None
    position_ids: Tensor | None = None
    document_ids: Tensor | None = None
    sample_keys: Tensor | None = None
    positions: Positions | None = None
    skipping: Skipping = NOTHING_SKIPPED

    token_types: ClassVar[None] = None

    def __post_init__(self) -> None:
        assert (self.loss_mask is None) == (self.counted is None), "a mask goes with what it counts"

    def total(self, values: Tensor) -> Tensor:
        """The sum of values [s, b] over the positions, each times its weight in the loss."""
        return values.sum() if self.loss_mask is None else (values * self.loss_mask.t()).sum()

    @classmethod
    def from_arrays(cls, arrays: Mapping, device: torch.device, vocab_size: int) -> Batch:
        """Make a batch from a dataset's arrays (keys are the tensor attributes; others are ignored).

        Nothing waits for the device.

        Raises:
            DataError: a token or label lies outside [0, vocab_size). The model does not check again.
        """
        check_token_ids(arrays, vocab_size)
        names = ("tokens", "labels", "loss_mask", "position_ids", "document_ids", "sample_keys")
        tensors = {n: torch.from_numpy(arrays[n]).to(device, non_blocking=True) for n in names if n in arrays}
        counted = float(arrays["loss_mask"].sum(dtype="float64")) if "loss_mask" in arrays else None
        return cls(**tensors, counted=counted)

    @property
    def counts(self) -> dict[str, float]:
        """The weighted number of positions that count, and how much there is to route."""
        tokens = float(self.tokens.numel())
        return {
            "lm": tokens if self.counted is None else self.counted,
            "tokens": tokens,
            "sequences": float(len(self.tokens)),
            "micro_batches": 1.0,
        }


@dataclass(frozen=True)
class TextCollate:
    """Turns a dataset's arrays into a `Batch`. Arrays that would change nothing are left out: a mask of ones,
    and positions that count from 0.

    Attributes:
        vocab_size: number of ids that tokens and labels may have.
        device: the device of the tensors.
        with_positions: whether to keep the positions, because they do not count from 0.
        seed: seed of the dropout streams; None for evaluation, which drops nothing.
    """

    vocab_size: int
    device: torch.device
    with_positions: bool = False
    seed: int | None = None

    @classmethod
    def of(cls, config: Config, vocab_size: int, device: torch.device, seed: int | None) -> TextCollate:
        """The collate function for a run's configuration."""
        return cls(vocab_size, device, config.data.reset_position_ids, seed)

    def __call__(self, arrays: Mapping[str, Any], samples: tuple[int, ...]) -> Batch:
        """Make a batch; `samples` are the positions of the sequences in the training order, one per row.

        Raises DataError for a token or label outside the vocabulary.
        """
        kept = {k: v for k, v in arrays.items() if k != "position_ids" or self.with_positions}
        if "loss_mask" in kept and (kept["loss_mask"] == 1).all():
            del kept["loss_mask"]
        if self.seed is not None:
            kept["sample_keys"] = sample_keys(self.seed, samples)
        return Batch.from_arrays(kept, self.device, self.vocab_size)


def random_text(rng: np.random.Generator, count: int, length: int, vocab_size: int) -> dict[str, np.ndarray]:
    """Arrays of `count` random sequences; about 1 / (1 + i) of the positions of sequence i count."""
    text = rng.integers(0, vocab_size, (count, length + 1))
    share = 1.0 / (1 + np.arange(count))[:, None]
    mask = (rng.random((count, length)) < share).astype(np.float32)
    arrays = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask}
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}
