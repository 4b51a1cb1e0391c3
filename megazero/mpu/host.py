"""Reading from a device, which makes the host wait for all the work queued there.

A step that is checked for such waits (`host_waits.py`) may make them here, and only here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor


class Reading:
    """The elements of a tensor on their way from the device.

    Args:
        tensor: is read after the work that is queued now. Work that is queued later must not change it
            before `values` has been read.
    """

    def __init__(self, tensor: Tensor):
        self._tensor, self._event = tensor.reshape(-1), None
        if tensor.is_cuda:
            there = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
            self._tensor = there.copy_(self._tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @cached_property
    def values(self) -> list[float] | None:
        """The elements as floats, for which the host waits; None on the meta device, where there are none."""
        if self._tensor.is_meta:
            return None
        if self._event is not None:
            self._event.synchronize()
        return [float(value) for value in self._tensor.tolist()]


def read_values(tensor: Tensor) -> list[float] | None:
    """The elements of a tensor as floats; None on the meta device, where nothing has a value."""
    return Reading(tensor).values


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor itself if it is on the device, and a copy there otherwise, for which the host waits."""
    if tensor.device == device:
        return tensor
    with _waiting(tensor.device if tensor.is_cuda else device):
        return tensor.to(device)


@contextmanager
def _waiting(device: torch.device) -> Iterator[None]:
    """A context in which the host may wait for the device without a warning or error from torch."""
    mode = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
    if not mode:
        yield
        return
    torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
