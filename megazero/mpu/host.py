"""Reading from a device, which makes the host wait for all the work queued there.

A step that is checked for such waits (`host_waits.py`) may make them here, and only here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def read_values(tensor: Tensor) -> list[float] | None:
    """The elements of a tensor as floats; None on the meta device, where nothing has a value."""
    if tensor.is_meta:
        return None
    with _waiting(tensor.device):
        return [float(value) for value in tensor.reshape(-1).tolist()]


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor itself if it is on the device, and a copy there otherwise, for which the host waits."""
    if tensor.device == device:
        return tensor
    with _waiting(tensor.device if tensor.is_cuda else device):
        return tensor.to(device)


@contextmanager
def _waiting(device: torch.device) -> Iterator[None]:
    """Let the host wait for the device within the block, without a report of torch."""
    mode = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
    if not mode:
        yield
        return
    torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
