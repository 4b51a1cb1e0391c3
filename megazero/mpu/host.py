"""Reading from a device, which makes the host wait for all the work queued there."""

from __future__ import annotations

import torch
from torch import Tensor


def read_values(tensor: Tensor) -> list[float] | None:
    """The elements of a tensor as floats; None on the meta device, where nothing has a value."""
    return None if tensor.is_meta else [float(value) for value in tensor.reshape(-1).tolist()]


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor itself if it is on the device, and a copy there otherwise, for which the host waits."""
    return tensor if tensor.device == device else tensor.to(device)
