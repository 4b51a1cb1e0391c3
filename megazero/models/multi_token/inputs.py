"""`MtpInputs`: a batch's tokens and labels, shifted to later positions for multi-token prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megazero.host_memory import sent_to
from megazero.models.targets import Targets


@dataclass(frozen=True)
class MtpInputs:
    """A batch's tokens and targets, shifted by some positions; 0 beyond the end of a text.

    Attributes:
        tokens: int64 [b, s].
        targets: the tokens that follow `tokens`, with the weights of their own positions.
    """

    tokens: Tensor
    targets: Targets

    @classmethod
    def of_arrays(
        cls,
        arrays: Mapping[str, np.ndarray],
        depths: int,
        own: Callable[[np.ndarray], np.ndarray],
        device: torch.device,
    ) -> tuple[MtpInputs, ...]:
        """Shift a dataset's arrays by 1 to `depths` positions.

        Args:
            arrays: tokens, labels, and optionally loss_mask and document_ids, [b, s] each.
            depths: number of further tokens to predict.
            own: selects this rank's columns of an array [b, s].
        """
        made = []
        for shifted in _shifted(arrays, depths):
            tokens, labels, weights = (np.ascontiguousarray(own(array)) for array in shifted)
            counted = float(weights.sum(dtype="float64"))
            first, second, third = (sent_to(device, torch.from_numpy(x)) for x in (tokens, labels, weights))
            made.append(cls(first, Targets(second, third, counted)))
        return tuple(made)


def _shifted(
    arrays: Mapping[str, np.ndarray], depths: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the tokens, labels and weights of each depth, shifted within each document of a sequence."""
    tokens, labels, documents = arrays["tokens"], arrays["labels"], arrays.get("document_ids")
    weights = arrays.get("loss_mask", np.ones(tokens.shape, dtype=np.float32))
    for depth in range(1, depths + 1):
        inside = np.zeros(tokens.shape, dtype=bool)
        inside[:, :-depth] = True if documents is None else documents[:, depth:] == documents[:, :-depth]
        yield tuple(  # type: ignore[misc]
            np.where(inside, np.roll(array, -depth, axis=1), 0).astype(array.dtype)
            for array in (tokens, labels, weights)
        )
