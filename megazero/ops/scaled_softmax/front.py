"""The public scaled softmax and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megazero.ops.autograd import Gradients, apply
from megazero.ops.chunks import compute_dtype
from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.ops.scaled_softmax.cuda import scaled_softmax_cuda
from megazero.ops.scaled_softmax.reference import may_attend, same_document, scaled_softmax_reference


class _ScaledSoftmax(torch.autograd.Function):
    """The softmax; it saves only its result, in the input's dtype."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float, causal: bool, mask: Tensor | None) -> Tensor:
        q, k = scores.shape[-2:]
        wide = scores.to(compute_dtype(scores.dtype)) * scale
        if causal and q > 1:
            wide.masked_fill_(may_attend(q, k, scores.device).logical_not_(), -torch.inf)
        if mask is not None:
            wide.masked_fill_(~mask, -torch.inf)
        probs = torch.softmax(wide, -1)
        if mask is not None or (causal and q > k):
            probs.masked_fill_(wide.amax(-1, keepdim=True) == -torch.inf, 0)
        probs = probs.to(scores.dtype)
        ctx.save_for_backward(probs)
        ctx.scale = scale
        return probs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        (probs,) = ctx.saved_tensors
        grad_scores = torch._softmax_backward_data(grad, probs, -1, probs.dtype)
        return grad_scores.mul_(ctx.scale), None, None, None


def scaled_softmax_fused(
    scores: Tensor, scale: float, causal: bool, mask: Tensor | None, *, document_ids: Tensor | None = None
) -> Tensor:
    """Softmax of scale * scores [..., q, k] where mask and documents allow."""
    if document_ids is not None:
        own = same_document(document_ids, scores.shape[-2])
        mask = own if mask is None else mask & own
    return apply(_ScaledSoftmax, scores, scale, causal, mask)


SCALED_SOFTMAX: Operator[Callable[..., Tensor]] = Operator(
    "scaled_softmax",
    (
        Implementation("cuda", scaled_softmax_cuda, on_cuda_kernels()),
        Implementation("fused", scaled_softmax_fused),
        Implementation("reference", scaled_softmax_reference),
    ),
)


def scaled_softmax(
    scores: Tensor, scale: float, causal: bool, mask: Tensor | None, *, document_ids: Tensor | None = None
) -> Tensor:
    """softmax(scale * scores) over keys for scores [b, n, q, k]: fp32 inside, the input's dtype outside.

    mask: bool, broadcastable to the scores; True means that the query may attend to the key. causal: with
    q != k (a KV cache) the last query sees the last key. document_ids: int [b, k], with q <= k; a query
    attends only to keys of the document of its own key, where the last query's is the last key. A row that
    may attend to nothing gives zeros. Raises ValueError if document_ids do not fit the scores.
    """
    if document_ids is not None:
        _check_documents(scores, document_ids)
    chosen = SCALED_SOFTMAX.choose(CallFacts.of(scores))
    return chosen.fn(scores, scale, causal, mask, document_ids=document_ids)


def _check_documents(scores: Tensor, document_ids: Tensor) -> None:
    sizes, given = tuple(scores.shape), tuple(document_ids.shape)
    if len(sizes) != 4 or sizes[2] > sizes[3] or given != (sizes[0], sizes[3]):
        raise ValueError(
            "`document_ids` must be [b, k] for scores [b, n, q, k] with q at most k, but is "
            f"{list(given)} for {list(sizes)}; give each key the id of its document."
        )
