"""Layers compiled by torch.compile, one by one: a step computes the same values as without it.

Each layer is a region of its own, so pipelines, recompute, ZeRO and the executor see the usual modules and
hooks, and all layers of a kind share the code that is compiled for the first. Within a region operators take
their traceable implementations, which the compiler fuses (see `ops.dispatch`).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from megazero.errors import ConfigError
from megazero.layers.fp8 import Fp8Scaling, products_in_8_bits
from megazero.layers.inputs import LayerInputs
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear
from megazero.layers.norm import Norm
from megazero.layers.sums import Sums
from megazero.layers.transformer import Forward, layers_of, use_forward
from megazero.ops.compiler import compiles_every_length


def compile_layers(blocks: Iterable[nn.Module], backend: str) -> None:
    """Make torch.compile compute the training passes of the layers among `blocks` from now on.

    Shapes are constants: each new sequence length is compiled again, up to a thousand of them. Passes without
    gradients, with a cache or for some rows only run uncompiled. Where tensor-parallel ranks communicate, a
    region ends before the linear layer and the next one begins after it. The 8-bit codes of weights are made
    before a region, so that the region is the same for all micro-batches of a step.

    Args:
        blocks: the blocks of a chunk; embedding and head stay as they are.
        backend: the name of torch's compiler, such as ``inductor``.

    Raises:
        ConfigError: a tool that the compiler needs is not installed.
    """
    compiles_every_length()  # a curriculum has many
    layers = layers_of(blocks)
    if backend == "inductor" and layers:
        _check_tools(layers[0].placement.device)
    for layer in layers:
        linears = [m for m in layer.modules() if isinstance(m, (ColumnParallelLinear, RowParallelLinear))]
        sliced = [m for m in layer.modules() if isinstance(m, Norm) and m.slices is not None]
        if layer.placement.tp.size > 1:
            apart: Sequence[nn.Module] = [*linears, *sliced]
            for module in apart:
                module.forward = torch.compiler.disable(module.forward)
        compiled = torch.compile(layer.forward, dynamic=False, backend=backend)
        use_forward(layer, _choosing(layer.layer, layer.forward, compiled, products_in_8_bits(layer)))


def _check_tools(device: torch.device) -> None:
    """Raise ConfigError unless the tools that inductor needs are installed; its own message is obscure."""
    if device.type == "cuda":
        installed, what = importlib.util.find_spec("triton") is not None, "Triton"
    else:
        installed, what = shutil.which(os.environ.get("CXX", "g++")) is not None, "a C++ compiler"
    if not installed:
        raise ConfigError(
            f"`compile` must be off where {what} is not installed, but is on; install it, or leave "
            "`--compile` out"
        )


def _choosing(
    layer: int, plain: Forward, compiled: Forward, in_8_bits: Sequence[tuple[Fp8Scaling, nn.Parameter]]
) -> Forward:
    def forward(x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Sums]:
        special = inputs.wanted is not None or inputs.generating
        if special or not torch.is_grad_enabled():
            return plain(x, inputs)
        for scaling, weight in in_8_bits:
            scaling.weight_codes(weight)
        return compiled(x, inputs.at(layer))

    return forward
