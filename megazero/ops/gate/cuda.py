"""The gate by the kernels of csrc/gate/cuda.cu."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.kernels import KernelLibrary
from megazero.ops.autograd import Gradients, apply
from megazero.ops.cuda import CUDA_KERNELS
from megazero.ops.gate.reference import Gating

# A warp takes a token, and each of its lanes one choice.
MOST_CHOSEN = 32


class _CudaGate(torch.autograd.Function):
    """The gate; it saves logits and results, and a result without a gradient costs backward nothing."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, chosen: Tensor, gating: Gating, kernels: KernelLibrary
    ) -> tuple[Tensor, Tensor]:
        logits, chosen = logits.contiguous(), chosen.contiguous()
        (n, experts), k = logits.shape, chosen.shape[1]
        probabilities, weights = torch.empty_like(logits), logits.new_empty(n, k)
        ctx.sizes = (n, experts, k, list(Gating).index(gating))
        kernels.launch("gate_forward", *ctx.sizes, logits, chosen, probabilities, weights)
        ctx.save_for_backward(logits, chosen, probabilities, weights)
        ctx.set_materialize_grads(False)
        ctx.kernels = kernels
        return weights, probabilities

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_weights: Tensor | None, grad_probabilities: Tensor | None) -> Gradients:
        saved = ctx.saved_tensors
        grads = (None if g is None else g.contiguous() for g in (grad_probabilities, grad_weights))
        grad_logits = torch.empty_like(saved[0])
        ctx.kernels.launch("gate_backward", *ctx.sizes, *saved, *grads, grad_logits)
        return grad_logits, None, None, None


def gate_cuda(
    logits: Tensor, chosen: Tensor, gating: Gating, kernels: KernelLibrary = CUDA_KERNELS
) -> tuple[Tensor, Tensor]:
    """The gate for fp32 logits [n, E] on a GPU and at most 32 chosen experts per token."""
    return apply(_CudaGate, logits, chosen, gating, kernels)
