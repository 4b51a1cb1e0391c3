"""Batches for ranks that share sequences: each rank loads samples, and all ranks train on each sample."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader

from megazero.deepspeed.comm.collectives import all_gather, all_gather_object
from megazero.deepspeed.comm.world import AnyGroup
from megazero.deepspeed.models.tiled import IGNORED
from megazero.errors import DataError

_NEEDED = ("input_ids", "position_ids", "labels")
_T = TypeVar("_T")


class UlyssesSPDataLoaderAdapter:
    """Splits the batches of a loader into pieces for ranks that share sequences.

    The next batch of every rank is gathered; then each step yields this rank's piece of one rank's batch.
    ``labels`` become ``shift_labels``, shifted before they are split: the label of a piece's last token is
    the first token of the next piece. Pieces wait on the host.

    Args:
        dl: a loader of dictionaries with ``input_ids``, ``position_ids`` and ``labels`` [b, s]; other tensors
            are [b, s, ...]. Each rank has its own samples, and all ranks have equally many batches.
        sp_rank, sp_group, sp_world_size: the ranks that share a sequence.
        device: the device on which tensors are gathered.
    """

    def __init__(
        self,
        dl: DataLoader[Mapping[str, object]],
        sp_rank: int,
        sp_group: AnyGroup,
        sp_world_size: int,
        device: torch.device | str,
    ):
        self.dl, self.device = dl, device
        self.sp_rank, self.sp_group, self.sp_world_size = sp_rank, sp_group, sp_world_size
        self.iter = iter(dl)
        self.micro_batches: deque[dict[str, object]] = deque()
        self._warned = False

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> Iterator[dict[str, object]]:
        return self

    def __next__(self) -> dict[str, object]:
        """Return the next piece; after the StopIteration of an epoch, the next epoch starts.

        Raises:
            DataError: on all ranks, if a batch of one rank lacks a tensor, has tensors of several lengths or
                a length that does not divide by the ranks, or if a rank has fewer batches than others.
        """
        if not self.micro_batches:
            self.refill()
        return self.micro_batches.popleft()

    def refill(self) -> None:
        """Gather and split the next batch of each rank; see `__next__`."""
        batch = next(self.iter, None)
        shapes = self._gather_objects(None if batch is None else _shape(batch, self.sp_world_size))
        problems = [shape for shape in shapes if isinstance(shape, str)]
        ended = [shape is None for shape in shapes]
        if any(ended) and not all(ended):
            problems.append(
                f"`dl` must give equally many batches to the {self.sp_world_size} ranks that share a "
                f"sequence, but ends first on {sum(ended)} of them; drop the last batches"
            )
        if problems:
            raise DataError(problems[0])
        if batch is None:
            self.iter = iter(self.dl)
            raise StopIteration
        known = [shape for shape in shapes if isinstance(shape, tuple)]
        whole = {key: self._gather(value, known) for key, value in batch.items()}
        self._warn_of_copies(whole["input_ids"])
        for source in range(self.sp_world_size):
            self.micro_batches.append(self._piece({key: values[source] for key, values in whole.items()}))

    def _gather_objects(self, value: _T) -> list[_T]:
        gathered = [value] * self.sp_world_size
        all_gather_object(gathered, value, group=self.sp_group)
        return gathered

    def _gather(self, value: object, shapes: Sequence[tuple[int, int]]) -> Sequence[Any]:
        """Gather a value of each rank's batch; `shapes` are [b, s] of each rank's tensors."""
        if not isinstance(value, Tensor):
            return self._gather_objects(value)
        rest = value.shape[2:]
        width = math.prod(rest) * value.element_size()
        sizes = [rows * columns * width for rows, columns in shapes]
        # As equally many bytes, because not every backend gathers every dtype and unequal sizes.
        own = value.to(self.device).contiguous().view(-1).view(torch.uint8)
        own = pad(own, (0, max(sizes) - own.numel()))
        gathered = [torch.empty_like(own) for _ in shapes]
        all_gather(gathered, own, group=self.sp_group)
        return [
            data[:size].view(value.dtype).view(*shape, *rest)
            for data, size, shape in zip(gathered, sizes, shapes, strict=True)
        ]

    def _piece(self, batch: dict[str, Any]) -> dict[str, object]:
        labels = batch.pop("labels")
        batch["shift_labels"] = pad(labels[:, 1:], (0, 1), value=IGNORED)
        size = labels.shape[1] // self.sp_world_size
        return {
            key: value.narrow(1, self.sp_rank * size, size).cpu() if isinstance(value, Tensor) else value
            for key, value in batch.items()
        }

    def _warn_of_copies(self, ids: Sequence[Tensor]) -> None:
        if self._warned or self.sp_world_size == 1:
            return
        self._warned = True  # only the first batches are compared
        if all(torch.equal(ids[0], other) for other in ids[1:]):
            warnings.warn(
                f"the {self.sp_world_size} ranks that share a sequence have loaded the same samples, each of "
                "which is then trained on as often; give the loader a DistributedSampler over all ranks",
                stacklevel=4,
            )


def _shape(batch: Mapping[str, Any], ranks: int) -> tuple[int, int] | str:
    """Return [b, s] of a batch, or a sentence on what is wrong with the batch."""
    for name in _NEEDED:
        if not isinstance(batch.get(name), Tensor):
            return (
                f"`{name}` must be a tensor in each batch of `dl`, but is {type(batch.get(name)).__name__}; "
                "let the collator make it, positions as `torch.arange(s)`, restarted at each document"
            )
    shape = batch["input_ids"].shape
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.shape[:2] != shape:
            return (
                f"`{name}` must have the shape of `input_ids` {list(shape)} first, but has "
                f"{list(value.shape)}; pad it, or leave it out"
            )
    if shape[1] % ranks:
        return (
            f"`input_ids` must have a multiple of {ranks} columns, one piece for each rank that shares a "
            f"sequence, but has {shape[1]}; pad samples to one"
        )
    return shape[0], shape[1]
