"""Batches of any structure: the tensors in them, and how a model takes them and returns the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

Collate = Callable[[list[Any]], object]
"""Makes a batch of a list of samples."""
_T = TypeVar("_T")


class RepeatingLoader(Generic[_T]):
    """Iterates over an iterable without end.

    Args:
        loader: the iterable; it must yield at least one item each time.
    """

    def __init__(self, loader: Iterable[_T]):
        self.loader = loader
        self._items = iter(loader)

    def __iter__(self) -> Iterator[_T]:
        return self

    def __next__(self) -> _T:
        try:
            return next(self._items)
        except StopIteration:
            self._items = iter(self.loader)
            return next(self._items)


def map_tensors(value: _T, change: Callable[[Tensor], Tensor]) -> _T:
    """Apply `change` to each tensor within nested tuples, lists, mappings and dataclasses; returns a copy."""
    kind: Callable[..., _T] = type(value)
    if isinstance(value, Tensor):
        return cast(_T, change(value))
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


def tensors_of(value: object) -> Iterator[Tensor]:
    """All tensors within a value, in the order of `map_tensors`."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        value = tuple(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = tuple(getattr(value, f.name) for f in dataclasses.fields(value))
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)


def to_half(value: _T) -> _T:
    """Cast the floating-point tensors within a value to fp16; returns a copy."""
    return map_tensors(value, lambda t: t.half() if t.is_floating_point() else t)


def as_arguments(batch: object, device: torch.device) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments of a model for a batch, on the device.

    A mapping is passed by keyword, a tuple or list by position, and any other batch as one argument.
    """
    batch = map_tensors(batch, lambda t: t.to(device))
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def loss_of(output: Any) -> Tensor:
    """The loss in a model's output: its `loss`, its first item, or the output itself."""
    if hasattr(output, "loss"):
        output = output.loss
    elif isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    elif isinstance(output, (tuple, list)):
        output = output[0]
    loss: Tensor = output
    return loss
