"""Batches from a user's dataset: this rank's share, micro-batch by micro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from megazero.mpu.context import ParallelContext


@dataclass(frozen=True)
class LoaderOptions:
    """How a loader makes batches.

    Attributes:
        batch_size: samples per batch.
        drop_last: leave out the last batch if it is short.
        shuffle: shuffle the samples.
        sampler: chooses this rank's samples; None for torch's `DistributedSampler`.
        pin_memory: copy batches to pinned memory, where there is a CUDA device.
        workers: processes that load; 0 for this one.
    """

    batch_size: int
    drop_last: bool = False
    shuffle: bool = True
    sampler: Sampler[Any] | None = None
    pin_memory: bool = False
    workers: int = 0


def build_dataloader(
    dataset: Dataset[Any],
    collate_fn: Callable[[list[Any]], Any] | None,
    options: LoaderOptions,
    context: ParallelContext,
) -> DataLoader[Any]:
    """Batches of this data-parallel rank, in the order in which DeepSpeed distributes samples.

    Samples are shuffled with torch's `DistributedSampler`, seed 0, the same order in every epoch unless
    ``dataloader.sampler.set_epoch`` is called; an iterable dataset is used as it comes.
    """
    sampler = options.sampler
    if sampler is None and not isinstance(dataset, IterableDataset):
        data = context.data
        sampler = DistributedSampler(dataset, num_replicas=data.size, rank=data.rank, shuffle=options.shuffle)
    return DataLoader(
        dataset,
        batch_size=options.batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=options.drop_last,
        pin_memory=options.pin_memory and context.device.type == "cuda",
        num_workers=options.workers,
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


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in `value`, as `map_tensors` finds them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        value = tuple(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = tuple(getattr(value, f.name) for f in dataclasses.fields(value))
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)


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
