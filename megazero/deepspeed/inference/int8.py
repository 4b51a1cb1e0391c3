"""Linear layers whose weights are int8 in memory and are made floating again for each product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from megazero.deepspeed.tensor_parallel.layers import SlicedLinear, is_linear


class Int8Rows(nn.Module):
    """A weight [n, m] as int8 with a scale for each of `groups` parts of each row: the part's largest / 127.

    It halves the memory of fp16 weights, and costs one pass over them in each product.

    Args:
        dtype: the type of products.
        groups: parts of a row; rows that do not divide by it have one.
    """

    def __init__(self, dtype: torch.dtype, groups: int):
        super().__init__()
        self.dtype, self.groups = dtype, groups

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Round a weight."""
        parts = weight.float().view(weight.shape[0], self._parts(weight.shape[1]), -1)
        scale = parts.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        return (parts / scale).round().to(torch.int8).view_as(weight), scale

    def forward(self, rounded: Tensor, scale: Tensor) -> Tensor:
        """The weight again."""
        parts = rounded.view(*scale.shape[:2], -1).to(scale.dtype)
        return (parts * scale).view_as(rounded).to(self.dtype)

    def _parts(self, width: int) -> int:
        return self.groups if width % self.groups == 0 else 1


def quantize(model: nn.Module, dtype: torch.dtype, groups: int) -> int:
    """Round the weights of all linear layers but the output layer, and return how many layers that are."""
    model.requires_grad_(False)
    find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find_head()
    layers = [
        module
        for module in model.modules()
        if (is_linear(module) or isinstance(module, SlicedLinear)) and module is not head
    ]
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", Int8Rows(dtype, groups), unsafe=True)
    return len(layers)
