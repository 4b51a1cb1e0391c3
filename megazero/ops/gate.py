"""The gate of a router: the weights of the chosen experts, and the probabilities of all."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.autograd import Context, Gradients, apply, once_differentiable
from megazero.ops.cuda import cuda_kernels, on_cuda_kernels
from megazero.ops.dispatch import CallFacts, Implementation, Operator, kinds_of_calls
from megazero.ops.example import Example, Traffic

# A warp takes a token, and each of its lanes one choice.
MOST_CHOSEN = 32
_TINY = 1e-20
_Ctx = Context[tuple[KernelLibrary, tuple[int, int, int, int]]]


class Gating(enum.Enum):
    """The way from logits to weights: a softmax over the chosen ones, a softmax over all, or sigmoids."""

    SOFTMAX_AFTER = "softmax_after"
    SOFTMAX_BEFORE = "softmax_before"
    SIGMOID = "sigmoid"


@dataclass(frozen=True)
class GateFacts(CallFacts):
    """The facts that decide which implementation runs.

    Attributes:
        small: whether a warp can hold the chosen experts.
    """

    small: bool


def gate_reference(logits: Tensor, chosen: Tensor, gating: Gating) -> tuple[Tensor, Tensor]:
    """(weights [n, k], probabilities [n, E]) of logits [n, E] and the experts chosen [n, k]."""
    if gating is not Gating.SIGMOID:
        probabilities = logits.softmax(1)
        if gating is Gating.SOFTMAX_BEFORE:
            return probabilities.gather(1, chosen), probabilities
        return logits.gather(1, chosen).softmax(1), probabilities
    scores = logits.sigmoid()
    probabilities = scores / (scores.sum(1, keepdim=True) + _TINY)
    weights = scores.gather(1, chosen)
    if chosen.shape[1] > 1:
        weights = weights / (weights.sum(1, keepdim=True) + _TINY)
    return weights, probabilities


class _CudaGate(torch.autograd.Function):
    """The gate; it saves logits and results, and a result without a gradient costs backward nothing."""

    @staticmethod
    def forward(
        ctx: _Ctx, logits: Tensor, chosen: Tensor, gating: Gating, kernels: KernelLibrary
    ) -> tuple[Tensor, Tensor]:
        logits, chosen = logits.contiguous(), chosen.contiguous()
        (n, experts), k = logits.shape, chosen.shape[1]
        probabilities, weights = torch.empty_like(logits), logits.new_empty(n, k)
        sizes = (n, experts, k, list(Gating).index(gating))
        kernels.launch("gate_forward", *sizes, logits, chosen, probabilities, weights)
        ctx.save_for_backward(logits, chosen, probabilities, weights)
        ctx.set_materialize_grads(False)
        ctx.kept = kernels, sizes
        return weights, probabilities

    @staticmethod
    @once_differentiable
    def backward(ctx: _Ctx, grad_weights: Tensor | None, grad_probabilities: Tensor | None) -> Gradients:
        saved, (kernels, sizes) = ctx.saved_tensors, ctx.kept
        grads = (None if g is None else g.contiguous() for g in (grad_probabilities, grad_weights))
        grad_logits = torch.empty_like(saved[0])
        kernels.launch("gate_backward", *sizes, *saved, *grads, grad_logits)
        return grad_logits, None, None, None


def gate_cuda(
    logits: Tensor, chosen: Tensor, gating: Gating, kernels: KernelLibrary | None = None
) -> tuple[Tensor, Tensor]:
    """The gate for fp32 logits [n, E] on a GPU and at most 32 chosen experts per token."""
    return apply(_CudaGate, logits, chosen, gating, kernels or cuda_kernels())


def _call(gating: Gating, n: int, experts: int, k: int) -> Callable[..., tuple[Tensor, Tensor]]:
    chosen = torch.rand(n, experts, generator=torch.Generator().manual_seed(k)).argsort(1)[:, :k]
    return lambda f, logits: f(logits, chosen.to(logits.device), gating)


def _moved(kernels: dict[str, int], dtype: torch.dtype) -> dict[str, int]:
    return kernels


def _examples() -> Iterator[Example]:
    """One expert, some of many, all of them, more than a warp holds; even logits and saturated ones."""
    for n, experts, k in ((5, 4, 2), (1, 1, 1), (7, 65, 8), (0, 4, 2), (3, 33, 33), (3, 1030, 2)):
        for scale in (1.0, 6.0):
            for gating in Gating:
                label, own = f"{k} of {(n, experts)} x {scale} {gating.value}", {"small": k <= MOST_CHOSEN}
                yield Example(label, ((n, experts),), _call(gating, n, experts, k), scale, own, slack=scale)
    n, experts, k = 128, 128, 8
    every, few = n * experts * 4, n * k * 4
    for gating in Gating:
        # Backward of the softmax over all needs the chosen logits at most.
        again = every if gating is Gating.SIGMOID else few
        moved = {
            "gate_forward": 2 * every + few + 2 * few,
            "gate_backward": 3 * every + again + 2 * few + 2 * few,
        }
        yield Example(
            f"gate {gating.value}",
            ((n, experts),),
            _call(gating, n, experts, k),
            traffic=Traffic(partial(_moved, moved), {"": torch.float32}),
        )


GATE: Operator[Callable[[Tensor, Tensor, Gating], tuple[Tensor, Tensor]]] = Operator(
    "gate",
    (
        Implementation("cuda", gate_cuda, on_cuda_kernels(frozenset({torch.float32}), small=True)),
        Implementation("reference", gate_reference),
    ),
    kinds_of_calls(GateFacts, small=(False, True)),
    _examples,
)


def gate(logits: Tensor, chosen: Tensor, gating: Gating) -> tuple[Tensor, Tensor]:
    """The weights of each token's chosen experts, and the probabilities of all experts.

    With softmax gating, the weights are the softmax over the chosen logits, or the chosen ones of the softmax
    over all (Shazeer et al. 2017). With sigmoids they are the chosen scores, for k > 1 divided by their sum
    (DeepSeek-V3, arXiv:2412.19437).

    Args:
        logits: [n, E]; the router's are fp32.
        chosen: int64 [n, k], distinct numbers of experts for each token.
        gating: one of these three ways.

    Returns:
        weights [n, k], and probabilities [n, E], which sum to 1; both have gradients.
    """
    facts = GateFacts.of(logits, small=chosen.shape[1] <= MOST_CHOSEN)
    return GATE.choose(facts).fn(logits, chosen, gating)
