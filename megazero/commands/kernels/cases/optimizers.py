"""Steps of optimizers with bf16 gradients and bf16 weights: all is read or written once, moments both."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megazero.commands.kernels.case import KernelCase
from megazero.kernels import KernelLibrary
from megazero.ops.adagrad.cuda import adagrad_cuda
from megazero.ops.adam.cuda import adam_cuda
from megazero.ops.lion.cuda import lion_cuda
from megazero.ops.sgd.cuda import sgd_cuda

COUNT = 3 << 14
_MASTERS, _MOMENT, _GRADIENT, _WEIGHTS = 8 * COUNT, 8 * COUNT, 2 * COUNT, 2 * COUNT


def _tensors() -> tuple[Tensor, ...]:
    """Masters, gradients, two moments and weights."""
    masters, first, second = (torch.rand(COUNT) for _ in range(3))
    return masters, torch.rand(COUNT).bfloat16(), first, second, torch.rand(COUNT).bfloat16()


def _adam(kernels: KernelLibrary) -> None:
    p, g, m, v, weights = ([tensor] for tensor in _tensors())
    adam_cuda(
        p,
        g,
        m,
        v,
        weights,
        step=1,
        lr=1e-3,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        kernels=kernels,
    )


def _sgd(kernels: KernelLibrary) -> None:
    p, g, u, _, weights = _tensors()
    sgd_cuda(p, g, u, weights, lr=1e-3, momentum=0.9, weight_decay=0.1, kernels=kernels)


def _lion(kernels: KernelLibrary) -> None:
    p, g, m, _, weights = _tensors()
    lion_cuda(p, g, m, weights, lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, kernels=kernels)


def _adagrad(kernels: KernelLibrary) -> None:
    p, g, total, _, weights = _tensors()
    adagrad_cuda(p, g, total, weights, lr=1e-3, eps=1e-8, weight_decay=0.1, kernels=kernels)


def _one_moment(name: str, run: Callable[[KernelLibrary], None]) -> KernelCase:
    return KernelCase(f"{name} bf16", run, {f"{name}_update": _MASTERS + _MOMENT + _GRADIENT + _WEIGHTS})


CASES = (
    KernelCase("adam bf16", _adam, {"adam_update": _MASTERS + 2 * _MOMENT + _GRADIENT + _WEIGHTS}),
    _one_moment("sgd", _sgd),
    _one_moment("lion", _lion),
    _one_moment("adagrad", _adagrad),
)
