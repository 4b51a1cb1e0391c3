"""Lion by the kernel of csrc/lion/cuda.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.kernels import KernelLibrary
from megazero.ops.segments import NO_SIGNALS, DeviceSignals, launch_update


@torch.no_grad()
def lion_cuda(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    weights: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    scale: float = 1.0,
    signals: DeviceSignals = NO_SIGNALS,
    kernels: KernelLibrary | None = None,
) -> None:
    """``p = p (1 - lr wd) - lr sign(b1 m + (1 - b1) g)``, then ``m = b2 m + (1 - b2) g``, in one pass."""
    settings = (beta1, beta2, lr, 1 - lr * weight_decay)
    launch_update(
        kernels,
        "lion_update",
        [param],
        [grad],
        ([exp_avg],),
        [weights],
        *settings,
        scale=scale,
        signals=signals,
    )
