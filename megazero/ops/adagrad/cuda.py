"""Adagrad by the kernel of csrc/adagrad/cuda.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.kernels import KernelLibrary
from megazero.ops.segments import NO_SIGNALS, DeviceSignals, launch_update


@torch.no_grad()
def adagrad_cuda(
    param: Tensor,
    grad: Tensor,
    total: Tensor,
    weights: Tensor | None = None,
    *,
    lr: float,
    eps: float,
    weight_decay: float,
    scale: float = 1.0,
    signals: DeviceSignals = NO_SIGNALS,
    kernels: KernelLibrary | None = None,
) -> None:
    """``s = s + g^2``, ``p = p - lr g / (sqrt(s) + eps)``, where g is scaled and includes ``wd p``."""
    settings = (lr, eps, weight_decay)
    launch_update(
        kernels,
        "adagrad_update",
        [param],
        [grad],
        ([total],),
        [weights],
        *settings,
        scale=scale,
        signals=signals,
    )
