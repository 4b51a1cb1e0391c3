"""Scaled, masked softmax by the kernels of csrc/scaled_softmax/cuda.cu."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.kernels import KernelLibrary
from megazero.ops.autograd import Gradients, apply
from megazero.ops.cuda import CUDA_KERNELS


def _four(x: Tensor) -> tuple[int, ...]:
    """The shape of x [.., q, k] as [b, n, q, k]."""
    assert x.dim() <= 4, "scores are [b, n, q, k]"
    return (1,) * (4 - x.dim()) + tuple(x.shape)


def _mask_and_strides(mask: Tensor | None) -> tuple[Tensor | None, tuple[int, ...]]:
    """The mask, contiguous, and its strides along the scores' dims [b, n, q, k]; 0 where it is broadcast."""
    if mask is None:
        return None, (0, 0, 0, 0)
    mask = mask.reshape(_four(mask)).contiguous()
    steps = zip(mask.shape, mask.stride(), strict=True)
    return mask.view(torch.uint8), tuple(stride if size > 1 else 0 for size, stride in steps)


def _readable_ids(document_ids: Tensor | None) -> Tensor | None:
    """The ids as the kernels read them: contiguous, of 4 or 8 bytes."""
    if document_ids is None:
        return None
    wide = document_ids.dtype in (torch.int32, torch.int64)
    return (document_ids if wide else document_ids.to(torch.int64)).contiguous()


def _id_bytes(ids: Tensor | None) -> int:
    return 0 if ids is None else ids.element_size()


class _CudaScaledSoftmax(torch.autograd.Function):
    """The softmax; it saves its result, in the input's dtype, and the ids of documents."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        scale: float,
        causal: bool,
        mask: Tensor | None,
        document_ids: Tensor | None,
        kernels: KernelLibrary,
    ) -> Tensor:
        scores = scores.contiguous()
        b, n, q, k = _four(scores)
        mask, strides = _mask_and_strides(mask)
        ids = _readable_ids(document_ids)
        probs = torch.empty_like(scores)
        sizes, masked = (b * n * q, n, q, k, int(causal)), (mask, *strides, ids, _id_bytes(ids))
        kernels.launch("scaled_softmax_forward", scores.dtype, *sizes, scores, scale, *masked, probs)
        ctx.save_for_backward(probs, ids)
        ctx.scale, ctx.causal, ctx.kernels = scale, causal, kernels
        return probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        probs, ids = ctx.saved_tensors
        b, n, q, k = _four(probs)
        grad, grad_scores = grad.contiguous(), torch.empty_like(probs)
        sizes, documents = (b * n * q, n, q, k, int(ctx.causal)), (ids, _id_bytes(ids))
        ctx.kernels.launch(
            "scaled_softmax_backward",
            *(probs.dtype, *sizes, probs, grad, ctx.scale, *documents, grad_scores),
        )
        return grad_scores, None, None, None, None, None


def scaled_softmax_cuda(
    scores: Tensor,
    scale: float,
    causal: bool,
    mask: Tensor | None,
    kernels: KernelLibrary = CUDA_KERNELS,
    *,
    document_ids: Tensor | None = None,
) -> Tensor:
    """Softmax of scale * scores [b, n, q, k] in fp32, fp16 or bf16 on a GPU, where the mask allows.

    With document_ids [b, k], what lies outside of a query's document is neither read forward nor backward.
    """
    return apply(_CudaScaledSoftmax, scores, scale, causal, mask, document_ids, kernels)
