"""AdamW by the kernel of csrc/adam/cuda.cu."""

from __future__ import annotations

import math

import torch

from megazero.kernels import KernelLibrary
from megazero.ops.cuda import CUDA_KERNELS
from megazero.ops.segments import NO_SIGNALS, DeviceSignals, launch_update


@torch.no_grad()
def adam_cuda(
    params,
    grads,
    exp_avgs,
    exp_avg_sqs,
    weights=None,
    *,
    step,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    scale=1.0,
    decoupled: bool = True,
    signals: DeviceSignals = NO_SIGNALS,
    kernels: KernelLibrary = CUDA_KERNELS,
) -> None:
    """One pass over memory for all tensors, from gradients as they are stored to the model's weights.

    Without `decoupled`, weight decay is a part of the gradient, as in Adam's first form (Kingma & Ba 2015).
    """
    root = math.sqrt(1 - beta2**step)
    decay, l2 = (1 - lr * weight_decay, 0.0) if decoupled else (1.0, weight_decay)
    settings = (beta1, beta2, lr * root / (1 - beta1**step), eps * root, decay, l2)
    moments = (exp_avgs, exp_avg_sqs)
    launch_update(
        kernels, "adam_update", params, grads, moments, weights, *settings, scale=scale, signals=signals
    )
