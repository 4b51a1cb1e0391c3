"""Softmax of scaled, masked attention scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.autograd import Context, Gradients, apply, once_differentiable
from megazero.ops.chunks import compute_dtype
from megazero.ops.cuda import cuda_kernels, on_cuda_kernels
from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.ops.example import Example, Traffic


def may_attend(q: int, k: int, device: torch.device) -> Tensor:
    """bool [q, k], True on and before the diagonal; with q != k the last query sees the last key."""
    return torch.ones(q, k, dtype=torch.bool, device=device).tril(k - q)


def same_document(document_ids: Tensor, q: int) -> Tensor:
    """bool [b, 1, q, k], True for keys of the query's document; ids are [b, k], the last query's the last."""
    k = document_ids.shape[1]
    return document_ids[:, None, k - q :, None] == document_ids[:, None, None, :]


def masked_scores(
    scores: Tensor, scale: float, causal: bool, mask: Tensor | None, document_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """scale * scores, -inf where a key may not be attended to; and bool [..., q, 1], True where none may be.

    A row with nothing to attend to has zeros instead, because softmax of all -inf has no gradient.
    """
    wide = scores.to(compute_dtype(scores.dtype)) * scale
    allowed = torch.ones_like(wide, dtype=torch.bool)
    if causal:
        allowed = allowed & may_attend(scores.shape[-2], scores.shape[-1], scores.device)
    if mask is not None:
        allowed = allowed & mask
    if document_ids is not None:
        allowed = allowed & same_document(document_ids, scores.shape[-2])
    none_allowed = ~allowed.any(-1, keepdim=True)
    return wide.masked_fill(~allowed, -torch.inf).masked_fill(none_allowed, 0), none_allowed


def scaled_softmax_reference(
    scores: Tensor, scale: float, causal: bool, mask: Tensor | None, *, document_ids: Tensor | None = None
) -> Tensor:
    """exp(scale * scores) over the keys that may be attended to, divided by its sum; zeros if none may be."""
    wide, none_allowed = masked_scores(scores, scale, causal, mask, document_ids)
    return torch.softmax(wide, -1).masked_fill(none_allowed, 0).to(scores.dtype)


@dataclass(frozen=True)
class _Call:
    """The other arguments of a call: see `scaled_softmax`."""

    scale: float
    causal: bool
    mask: Tensor | None


@dataclass(frozen=True)
class SoftmaxKernel:
    """The two passes over contiguous memory.

    Attributes:
        forward: scores, the call and ids of documents -> probabilities.
        backward: probabilities, their gradient, the call without its mask, and the ids -> that of the scores.
    """

    forward: Callable[[Tensor, _Call, Tensor | None], Tensor]
    backward: Callable[[Tensor, Tensor, _Call, Tensor | None], Tensor]


class _ScaledSoftmax(torch.autograd.Function):
    """The softmax; it saves its result, in the input's dtype, and the ids of documents."""

    @staticmethod
    def forward(
        ctx: Context[tuple[_Call, SoftmaxKernel]],
        scores: Tensor,
        scale: float,
        causal: bool,
        mask: Tensor | None,
        ids: Tensor | None,
        kernel: SoftmaxKernel,
    ) -> Tensor:
        probs = kernel.forward(scores.contiguous(), _Call(scale, causal, mask), ids)
        ctx.save_for_backward(probs, ids)
        ctx.kept = _Call(scale, causal, None), kernel
        return probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[tuple[_Call, SoftmaxKernel]], grad: Tensor) -> Gradients:
        (probs, ids), (call, kernel) = ctx.saved_tensors, ctx.kept
        return kernel.backward(probs, grad.contiguous(), call, ids), None, None, None, None, None


def _fused_forward(scores: Tensor, call: _Call, ids: Tensor | None) -> Tensor:
    q, k = scores.shape[-2:]
    wide = scores.to(compute_dtype(scores.dtype)) * call.scale
    if call.causal and q > 1:
        wide.masked_fill_(may_attend(q, k, scores.device).logical_not_(), -torch.inf)
    if call.mask is not None:
        wide.masked_fill_(~call.mask, -torch.inf)
    probs = torch.softmax(wide, -1)
    if call.mask is not None or (call.causal and q > k):
        probs.masked_fill_(wide.amax(-1, keepdim=True) == -torch.inf, 0)
    return probs.to(scores.dtype)


def _fused_backward(probs: Tensor, grad: Tensor, call: _Call, ids: Tensor | None) -> Tensor:
    return torch._softmax_backward_data(grad, probs, -1, probs.dtype).mul_(call.scale)


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


def _on_gpu(library: KernelLibrary) -> SoftmaxKernel:
    """The kernels: what lies outside of a query's document is neither read forward nor backward."""

    def sizes(x: Tensor, causal: bool) -> tuple[int, ...]:
        b, n, q, k = _four(x)
        return b * n * q, n, q, k, int(causal)

    def documents(ids: Tensor | None) -> tuple[Tensor | None, int]:
        return ids, 0 if ids is None else ids.element_size()

    def forward(scores: Tensor, call: _Call, ids: Tensor | None) -> Tensor:
        mask, strides = _mask_and_strides(call.mask)
        probs = torch.empty_like(scores)
        given = (*sizes(scores, call.causal), scores, call.scale, mask, *strides, *documents(ids))
        library.launch("scaled_softmax_forward", scores.dtype, *given, probs)
        return probs

    def backward(probs: Tensor, grad: Tensor, call: _Call, ids: Tensor | None) -> Tensor:
        grad_scores = torch.empty_like(probs)
        given = (*sizes(probs, call.causal), probs, grad, call.scale, *documents(ids))
        library.launch("scaled_softmax_backward", probs.dtype, *given, grad_scores)
        return grad_scores

    return SoftmaxKernel(forward, backward)


_FUSED = SoftmaxKernel(_fused_forward, _fused_backward)


def scaled_softmax_fused(
    scores: Tensor, scale: float, causal: bool, mask: Tensor | None, *, document_ids: Tensor | None = None
) -> Tensor:
    """Softmax of scale * scores [..., q, k] where mask and documents allow."""
    if document_ids is not None:
        own = same_document(document_ids, scores.shape[-2])
        mask = own if mask is None else mask & own
    return apply(_ScaledSoftmax, scores, scale, causal, mask, None, _FUSED)


def scaled_softmax_cuda(
    scores: Tensor,
    scale: float,
    causal: bool,
    mask: Tensor | None,
    kernels: KernelLibrary | None = None,
    *,
    document_ids: Tensor | None = None,
) -> Tensor:
    """Softmax of scale * scores [b, n, q, k] in fp32, fp16 or bf16 on a GPU, where the others allow."""
    kernel, ids = _on_gpu(kernels or cuda_kernels()), _readable_ids(document_ids)
    return apply(_ScaledSoftmax, scores, scale, causal, mask, ids, kernel)


def _call(
    scale: float, causal: bool, mask: Tensor | None, ids: Tensor | None = None
) -> Callable[..., Tensor]:
    def call(f: Callable[..., Tensor], scores: Tensor) -> Tensor:
        where, documents = (None if x is None else x.to(scores.device) for x in (mask, ids))
        return f(scores, scale, causal, where, document_ids=documents)

    return call


def _examples() -> Iterator[Example]:
    """Masks that leave rows empty, and documents."""
    random = torch.Generator().manual_seed(0)
    for b, n, q, k in ((2, 3, 5, 5), (1, 2, 1, 7), (2, 1, 3, 8), (2, 1, 8, 3), (1, 2, 65, 65)):
        keep = torch.rand(b, 1, q, k, generator=random) < 0.6
        keep[0, 0, q // 2] = False
        for scale in (0.125, 30.0):
            for causal in (False, True):
                for mask in (None, keep, torch.zeros(1, 1, q, k, dtype=torch.bool)):
                    kept = None if mask is None else int(mask.sum())
                    label = f"{(b, n, q, k)} {scale=} {causal=} mask={kept}"
                    # A saturated softmax has gradients near zero made of terms of order one, and rounds its
                    # scores in proportion to their size.
                    slack, call = 8.0 if scale > 1 else 1.0, _call(scale, causal, mask)
                    yield Example(label, ((b, n, q, k),), call, slack=slack)
    for q, k in ((6, 6), (2, 6), (67, 67)):
        ids = torch.tensor([[0, 1, 1, 1, 2, 2], [4, 4, -1, 4, 4, -1]]).repeat_interleave(k // 6 + 1, 1)[:, :k]
        for causal in (False, True):
            for mask in (None, torch.rand(2, 1, q, k, generator=random) < 0.6):
                label = f"documents {(q, k)} {causal=} mask={mask is not None}"
                yield Example(label, ((2, 2, q, k),), _call(0.5, causal, mask, ids))
    yield from _large_examples(random)


def _large_examples(random: torch.Generator) -> Iterator[Example]:
    """Under a causal mask half of what is read is hidden, and need not be read, as what lies in other
    documents; all of what is written is. Packs that lie partly in what is hidden are read whole.
    """
    heads, length = 2, 256
    lengths = (61, 1, 103, 91)  # of documents, of which none fills packs
    shape, whole = (1, heads, length, length), heads * length * length
    ids = torch.arange(4, dtype=torch.int32).repeat_interleave(torch.tensor(lengths)).view(1, length)
    mask = torch.rand(shape, generator=random) < 0.9
    for causal in (True, False):
        seen = heads * length * (length + 1) // 2 if causal else whole
        moves = _moves(seen, whole, 0 if causal else whole, 0)
        label = f"scaled_softmax {'causal' if causal else 'masked'}"
        yield Example(label, (shape,), _call(0.125, causal, None if causal else mask), traffic=Traffic(moves))
    for causal in (True, False):
        seen = heads * sum(n * (n + 1) // 2 if causal else n**2 for n in lengths)
        label = f"scaled_softmax documents{' causal' if causal else ''}"
        moves = _moves(seen, whole, 4 * length, 4 * length)
        yield Example(label, (shape,), _call(0.125, causal, None, ids), traffic=Traffic(moves))


def _moves(seen: int, whole: int, forward: int, backward: int) -> Callable[[torch.dtype], dict[str, int]]:
    """The bytes, if so many of the scores are seen and so many further bytes are read."""
    return lambda dtype: {
        "scaled_softmax_forward": (seen + whole) * dtype.itemsize + forward,
        "scaled_softmax_backward": (2 * seen + whole) * dtype.itemsize + backward,
    }


SCALED_SOFTMAX: Operator[Callable[..., Tensor]] = Operator(
    "scaled_softmax",
    (
        Implementation("cuda", scaled_softmax_cuda, on_cuda_kernels()),
        Implementation("fused", scaled_softmax_fused),
        Implementation("reference", scaled_softmax_reference),
    ),
    examples=_examples,
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
