"""Squared ReLU: x, y and both gradients."""

from __future__ import annotations

import torch

from megazero.commands.kernels.case import KernelCase
from megazero.kernels import KernelLibrary
from megazero.ops.squared_relu.cuda import squared_relu_cuda

COUNT = 96 * 1024


def _case(dtype: torch.dtype, name: str) -> KernelCase:
    def run(kernels: KernelLibrary) -> None:
        x = torch.randn(COUNT).to(dtype).requires_grad_()
        squared_relu_cuda(x, kernels).backward(torch.randn(COUNT).to(dtype))

    size = COUNT * dtype.itemsize
    must_move = {"squared_relu_forward": 2 * size, "squared_relu_backward": 3 * size}
    return KernelCase(f"squared_relu {name}", run, must_move)


CASES = tuple(_case(dtype, name) for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")))
