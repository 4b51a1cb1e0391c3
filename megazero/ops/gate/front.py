"""The public gate and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.ops.cuda import cuda_built
from megazero.ops.dispatch import CUDA, CallFacts, Implementation, Operator, kinds_of_calls, where
from megazero.ops.gate.cuda import MOST_CHOSEN, gate_cuda
from megazero.ops.gate.reference import Gating, gate_reference


@dataclass(frozen=True)
class GateFacts(CallFacts):
    """The facts that decide which implementation runs.

    Attributes:
        small: whether a warp can hold the chosen experts.
    """

    small: bool


GATE: Operator[Callable[[Tensor, Tensor, Gating], tuple[Tensor, Tensor]]] = Operator(
    "gate",
    (
        Implementation("cuda", gate_cuda, where(CUDA, frozenset({torch.float32}), cuda_built, small=True)),
        Implementation("reference", gate_reference),
    ),
    kinds_of_calls(GateFacts, small=(False, True)),
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
