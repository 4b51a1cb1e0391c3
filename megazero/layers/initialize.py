"""Initial weights: a function of (seed, global name, index in the whole parameter) and nothing else.

Each rank computes only its own slice, and every layout starts from the same model.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from megazero.mpu.grid import Place
from megazero.mpu.param_spec import spec_of
from megazero.mpu.rng import derive_key
from megazero.ops.counter_random import normal_block


def initialize(model: nn.Module, seed: int, place: Place) -> None:
    """Fill every parameter of `model`, the part of a rank at `place`, as its spec says; padding becomes zero.

    Meta tensors are left as they are.
    """
    initialize_parameters(model.parameters(), seed, place)


@torch.no_grad()
def initialize_parameters(params: Iterable[nn.Parameter], seed: int, place: Place) -> None:
    """Fill parameters as their specs say, like `initialize`.

    A copy of a parameter that belongs to another pipeline stage starts with the original's values.
    """
    for parameter in params:
        spec = spec_of(parameter)
        if parameter.is_meta:
            continue
        if spec.init.kind != "normal":
            parameter.fill_(1.0 if spec.init.kind == "ones" else spec.init.value)
            continue
        parameter.zero_()
        present = spec.present(place)
        if 0 in present:
            continue
        block = normal_block(
            derive_key(seed, "init", spec.tied_with or spec.name),
            spec.shape,
            spec.offset(place),
            present,
            spec.init.std,
            parameter.dtype if spec.init.made is None else torch.float32,
            parameter.device,
        )
        block = block if spec.init.made is None else spec.init.made(block)
        parameter[tuple(slice(0, n) for n in present)] = block
