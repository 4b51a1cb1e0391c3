"""SGD with momentum by the kernel of csrc/sgd/cuda.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.kernels import KernelLibrary
from megazero.ops.segments import NO_SIGNALS, DeviceSignals, launch_update


@torch.no_grad()
def sgd_cuda(
    param: Tensor,
    grad: Tensor,
    momentum_sum: Tensor | None,
    weights: Tensor | None = None,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    scale: float = 1.0,
    signals: DeviceSignals = NO_SIGNALS,
    kernels: KernelLibrary | None = None,
) -> None:
    """``u = momentum u + g``, ``p = p - lr u``, where g is scaled and includes ``wd p``, in one pass."""
    moments = (None if momentum_sum is None else [momentum_sum],)
    settings = (lr, momentum, weight_decay)
    launch_update(
        kernels, "sgd_update", [param], [grad], moments, [weights], *settings, scale=scale, signals=signals
    )
