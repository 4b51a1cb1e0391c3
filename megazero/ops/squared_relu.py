"""Squared ReLU, max(x, 0)^2 (So et al. 2021, Primer)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.autograd import Activation, ActivationKernel, apply
from megazero.ops.cuda import cuda_kernels, on_cuda_kernels, planned
from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.ops.example import Example, Traffic


def squared_relu_reference(x: Tensor) -> Tensor:
    """max(x, 0)^2."""
    return x.clamp(min=0).square()


def _forward(x: Tensor) -> tuple[Tensor, Tensor]:
    """The result and max(x, 0), of which backward is 2 max(x, 0) grad, in two passes."""
    positive = x.clamp(min=0)
    return positive * positive, positive


def _backward(positive: Tensor, grad: Tensor) -> Tensor:
    return (positive * grad).mul_(2)


def _on_gpu(library: KernelLibrary) -> ActivationKernel:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.empty_like(x)
        library.launch("squared_relu_forward", x.dtype, x.numel(), x, y)
        return y, x

    def backward(x: Tensor, grad: Tensor) -> Tensor:
        grad_x = torch.empty_like(x)
        library.launch("squared_relu_backward", x.dtype, x.numel(), x, grad, grad_x)
        return grad_x

    return ActivationKernel(forward, backward)


_FUSED = ActivationKernel(_forward, _backward)


def squared_relu_cuda(x: Tensor, kernels: KernelLibrary | None = None) -> Tensor:
    """max(x, 0)^2 for x of any shape in fp32, fp16 or bf16 on a GPU."""
    return apply(Activation, x, _on_gpu(kernels or cuda_kernels()))


def squared_relu_fused(x: Tensor) -> Tensor:
    """max(x, 0)^2 for x of any shape."""
    return apply(Activation, x, _FUSED)


def _examples() -> Iterator[Example]:
    for shape in ((3, 5), (1, 1), (257, 2, 33), (0, 4)):
        for scale in (1.0, 60.0):
            yield Example(f"{shape} x {scale}", (shape,), lambda f, x: f(x), scale)

    def moves(dtype: torch.dtype) -> dict[str, int]:
        size = 96 * 1024 * dtype.itemsize
        return {"squared_relu_forward": 2 * size, "squared_relu_backward": 3 * size}

    yield Example("squared_relu", ((96 * 1024,),), lambda f, x: f(x), traffic=Traffic(moves))


SQUARED_RELU: Operator[Callable[[Tensor], Tensor]] = Operator(
    "squared_relu",
    (
        Implementation("cuda", squared_relu_cuda, on_cuda_kernels()),
        planned(squared_relu_cuda),
        Implementation("fused", squared_relu_fused),
        Implementation("reference", squared_relu_reference),
    ),
    examples=_examples,
)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2, elementwise."""
    return SQUARED_RELU.choose(CallFacts.of(x)).fn(x)
