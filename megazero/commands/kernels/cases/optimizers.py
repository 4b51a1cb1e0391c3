"""Steps of optimizers with bf16 gradients and bf16 weights: all is read or written once, states both."""

from __future__ import annotations

import torch

from megazero.commands.kernels.case import KernelCase
from megazero.kernels import KernelLibrary
from megazero.ops.update import StepFacts, UpdateCall, update_cuda
from megazero.optim import ELEMENTWISE, Elementwise

COUNT = 3 << 14


def _case(rule: Elementwise) -> KernelCase:
    def run(kernels: KernelLibrary) -> None:
        master, *state = (torch.rand(COUNT) for _ in range(1 + len(rule.state_names)))
        grad, weights = (torch.rand(COUNT).bfloat16() for _ in range(2))
        call = UpdateCall(rule, StepFacts(1, 1e-3, 0.1), [master], [grad], [state], [weights])
        update_cuda(call, kernels=kernels)

    bytes_each = 8 * (1 + len(rule.state_names)) + 2 + 2
    return KernelCase(f"{rule.name} bf16", run, {f"{rule.name}_update": bytes_each * COUNT})


CASES = tuple(_case(rule()) for rule in ELEMENTWISE.values())
