"""A router's gate: logits and probabilities of all experts, numbers and weights of the chosen ones."""

from __future__ import annotations

import torch

from megazero.commands.kernels.case import KernelCase
from megazero.kernels import KernelLibrary
from megazero.ops.gate.cuda import gate_cuda
from megazero.ops.gate.reference import Gating

TOKENS, EXPERTS, CHOSEN = 128, 128, 8


def _case(gating: Gating) -> KernelCase:
    def run(kernels: KernelLibrary) -> None:
        logits = torch.randn(TOKENS, EXPERTS).requires_grad_()
        chosen = logits.detach().topk(CHOSEN, dim=1).indices
        weights, probabilities = gate_cuda(logits, chosen, gating, kernels)
        ((weights * torch.randn(TOKENS, CHOSEN)).sum() + probabilities.square().sum()).backward()

    every, few = TOKENS * EXPERTS * 4, TOKENS * CHOSEN * 4
    # Backward of the softmax over all needs the chosen logits at most.
    logits_again = every if gating is Gating.SIGMOID else few
    return KernelCase(
        f"gate {gating.value}",
        run,
        {
            "gate_forward": 2 * every + few + 2 * few,
            "gate_backward": 3 * every + logits_again + 2 * few + 2 * few,
        },
    )


CASES = tuple(map(_case, Gating))
