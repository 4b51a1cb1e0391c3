"""AdamW by the kernel of csrc/adam/cuda.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.kernels import KernelLibrary
from megazero.ops.segments import NO_SIGNALS, DeviceSignals, launch_update


@torch.no_grad()
def adam_cuda(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    weights: Sequence[Tensor | None] | None = None,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    scale: float = 1.0,
    signals: DeviceSignals = NO_SIGNALS,
    kernels: KernelLibrary | None = None,
) -> None:
    """One pass over memory for all tensors, from gradients as they are stored to the model's weights."""
    root = math.sqrt(1 - beta2**step)
    settings = (beta1, beta2, lr * root / (1 - beta1**step), eps * root, 1 - lr * weight_decay)
    moments = (exp_avgs, exp_avg_sqs)
    launch_update(
        kernels, "adam_update", params, grads, moments, weights, *settings, scale=scale, signals=signals
    )
