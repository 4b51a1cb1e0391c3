"""The embedding by the kernels of csrc/embedding/cuda.cu."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.kernels import KernelLibrary
from megazero.ops.autograd import Gradients, apply
from megazero.ops.cuda import CUDA_KERNELS

# The number of gradients of one row that make a partial sum, before the row's whole sum.
SEGMENT = 64


class _CudaEmbedding(torch.autograd.Function):
    """The look-up, which saves the tokens alone; backward sorts them and sums gradients in their order."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, first: int, vocab_size: int, kernels: KernelLibrary
    ) -> Tensor:
        tokens, weight = tokens.contiguous(), weight.contiguous()
        rows, width = weight.shape
        out = weight.new_empty(*tokens.shape, width)
        sizes = (tokens.numel(), width * weight.element_size(), first, rows, vocab_size)
        kernels.launch("embedding_forward", *sizes, weight, tokens, out)
        ctx.save_for_backward(tokens)
        ctx.first, ctx.weight_shape = first, weight.shape
        ctx.vocab_size, ctx.kernels = vocab_size, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        (tokens,) = ctx.saved_tensors
        rows, width = ctx.weight_shape
        grad, count = grad.contiguous(), tokens.numel()
        local = tokens.reshape(-1) - ctx.first
        known = min(rows, ctx.vocab_size - ctx.first)
        sorted_rows, order = local.masked_fill((local < 0) | (local >= known), rows).sort(stable=True)
        starts = torch.searchsorted(sorted_rows, torch.arange(rows + 1, device=local.device))
        partials = grad.new_empty(count // SEGMENT, width, dtype=torch.float32)
        grad_weight = grad.new_empty(rows, width)
        tensors = (sorted_rows, order, starts, grad, partials, grad_weight)
        ctx.kernels.launch("embedding_backward", grad.dtype, count, rows, width, SEGMENT, *tensors)
        return None, grad_weight, None, None, None


def embedding_cuda(
    tokens: Tensor, weight: Tensor, first: int, vocab_size: int, kernels: KernelLibrary = CUDA_KERNELS
) -> Tensor:
    """The look-up in a weight in fp32, fp16 or bf16 on a GPU; a token outside of the vocabulary gives NaN."""
    return apply(_CudaEmbedding, tokens, weight, first, vocab_size, kernels)
