"""SwiGLU by the kernels of csrc/swiglu/cuda.cu."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.kernels import KernelLibrary
from megazero.ops.autograd import Gradients, apply
from megazero.ops.cuda import CUDA_KERNELS


class _CudaSwiGLU(torch.autograd.Function):
    """One pass over memory each way; saves only its input."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, kernels: KernelLibrary) -> Tensor:
        gate_up = gate_up.contiguous()
        y = gate_up.new_empty(*gate_up.shape[:-2], gate_up.shape[-1])
        width = y.shape[-1]
        kernels.launch("swiglu_forward", y.dtype, y.numel() // max(width, 1), width, gate_up, y)
        ctx.save_for_backward(gate_up)
        ctx.kernels = kernels
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        (gate_up,) = ctx.saved_tensors
        grad, grad_gate_up, width = grad.contiguous(), torch.empty_like(gate_up), gate_up.shape[-1]
        count = grad.numel() // max(width, 1)
        ctx.kernels.launch("swiglu_backward", grad.dtype, count, width, gate_up, grad, grad_gate_up)
        return grad_gate_up, None


def swiglu_cuda(gate_up: Tensor, kernels: KernelLibrary = CUDA_KERNELS) -> Tensor:
    """silu(gate) * up for gate_up [..., 2, f] in fp32, fp16 or bf16 on a GPU; returns [..., f]."""
    return apply(_CudaSwiGLU, gate_up, kernels)
