"""A batch of samples as a metric sees it: whole text without masks, and how much of it is padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Samples:
    """A batch of `b` samples of a dataset.

    index: int64 [b], their numbers: the `i` of `SampleDataset.batch([i])`. text: int64 [b, t], the token ids,
    masked ones restored; t is T + 1 for samples that read the token after their last, as a GPT's do.
    lengths: int64 [b], tokens before the padding; None if there is none. arrays: all that the dataset gave.
    """

    index: np.ndarray
    text: np.ndarray
    lengths: np.ndarray | None
    arrays: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, index: np.ndarray, arrays: Mapping[str, np.ndarray]) -> Samples:
        """The samples of a dataset's arrays, which tell by `lengths` whether they are padded and masked."""
        tokens, labels, lengths = arrays["tokens"], arrays["labels"], arrays.get("lengths")
        if lengths is None:
            text = np.concatenate([tokens, labels[:, -1:]], axis=1)
        else:
            text = np.where(arrays["loss_mask"] > 0, labels, tokens)
        return cls(index, text, lengths, arrays)

    @cached_property
    def padding_mask(self) -> np.ndarray:
        """int64 [b, t], 1 where there is a token and 0 where there is padding."""
        if self.lengths is None:
            return np.ones_like(self.text)
        return (np.arange(self.text.shape[1]) < self.lengths[:, None]).astype(np.int64)

    def as_dict(self) -> dict[str, np.ndarray]:
        """The arrays by Megatron-DeepSpeed's names, text, padding_mask and index, and the dataset's own."""
        return {
            **self.arrays,
            "text": self.text,
            "padding_mask": self.padding_mask,
            "index": self.index,
        }
