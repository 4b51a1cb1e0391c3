"""Batches from a user's dataset: this rank's share, micro-batch by micro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from megazero.mpu.context import ParallelContext


def build_dataloader(
    dataset: Dataset[Any],
    collate_fn: Callable[[list[Any]], Any] | None,
    micro_batch_size: int,
    drop_last: bool,
    context: ParallelContext,
) -> DataLoader[Any]:
    """Micro-batches of this data-parallel rank, in the order in which DeepSpeed distributes samples.

    Samples are shuffled with torch's `DistributedSampler`, seed 0, the same order in every epoch unless
    ``dataloader.sampler.set_epoch`` is called; an iterable dataset is used as it comes.
    """
    sampler: DistributedSampler[Any] | None = None
    if not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(dataset, num_replicas=context.data.size, rank=context.data.rank)
    return DataLoader(
        dataset, batch_size=micro_batch_size, sampler=sampler, collate_fn=collate_fn, drop_last=drop_last
    )


class RepeatingLoader:
    """Goes over an iterable again and again.

    Args:
        loader: must yield at least one item each time it is iterated over.
    """

    def __init__(self, loader: Iterable[Any]):
        self.loader = loader
        self._items = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            self._items = iter(self.loader)
            return next(self._items)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of `value` with each tensor in it (in tuples, lists, mappings and dataclasses) changed."""
    kind: Any = type(value)
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(map_tensors(item, change) for item in value))
    if isinstance(value, (tuple, list)):
        return kind(map_tensors(item, change) for item in value)
    if isinstance(value, Mapping):
        return kind({key: map_tensors(item, change) for key, item in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: map_tensors(getattr(value, f.name), change) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    return value


def to_half(value: Any) -> Any:
    """A copy of `value` with its floating-point tensors in fp16."""
    return map_tensors(value, lambda t: t.half() if t.is_floating_point() else t)


def as_arguments(batch: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A model's arguments: a mapping by keyword, a tuple or list by position, any other batch alone."""
    batch = map_tensors(batch, lambda t: t.to(device))
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def loss_of(output: Any) -> Tensor:
    """The loss that a model returns: the output itself, its first item, or its `loss`."""
    if hasattr(output, "loss"):
        output = output.loss
    elif isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    elif isinstance(output, (tuple, list)):
        output = output[0]
    loss: Tensor = output
    return loss
