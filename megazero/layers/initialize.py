"""Initial weights: a function of (seed, global name, index in the whole parameter) and of nothing else.

Each rank computes only its own slice, and every layout starts from the same model.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from megazero.mpu import derive_key, spec_of
from megazero.ops.counter_random import normal_block


def initialize(model: nn.Module, seed: int, tp_rank: int, tp_size: int) -> None:
    """Fill every parameter of `model` as its spec says; padding becomes zero. Meta tensors are left alone."""
    initialize_parameters(model.parameters(), seed, tp_rank, tp_size)


@torch.no_grad()
def initialize_parameters(params: Iterable[nn.Parameter], seed: int, tp_rank: int, tp_size: int) -> None:
    """Fill parameters as their specs say, like `initialize`.

    A copy of a parameter of another pipeline stage starts with the values of its original.
    """
    for parameter in params:
        spec = spec_of(parameter)
        if parameter.is_meta:
            continue
        if spec.init.kind != "normal":
            parameter.fill_(1.0 if spec.init.kind == "ones" else 0.0)
            continue
        parameter.zero_()
        offset, local = spec.offset(tp_rank, tp_size), spec.local_shape(tp_size)
        present = tuple(
            max(0, min(n, whole - at)) for n, whole, at in zip(local, spec.shape, offset, strict=True)
        )
        if 0 in present:
            continue
        block = normal_block(
            derive_key(seed, "init", spec.tied_with or spec.name),
            spec.shape,
            offset,
            present,
            spec.init.std,
            parameter.dtype,
            parameter.device,
        )
        parameter[tuple(slice(0, n) for n in present)] = block
