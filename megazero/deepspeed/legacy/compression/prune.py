"""Masks that leave out a share of a layer's weights, rows, heads or channels.

By magnitude (``l1``), or by scores that are trained with the weights (``topk``; movement pruning, Sanh et al.
2020), whose gradients pass the choice straight through.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from megazero.deepspeed.legacy.compression.quantize import straight_through

What = Literal["sparse_pruning", "row_pruning", "head_pruning", "channel_pruning"]


@torch.no_grad()
def largest(scores: Tensor, ratio: float) -> Tensor:
    """1 at the ceil(ratio * n) largest of the n scores, 0 elsewhere, in their shape and dtype."""
    count = math.ceil(ratio * scores.numel())
    mask = torch.zeros_like(scores).view(-1)
    mask[scores.reshape(-1).float().argsort(descending=True, stable=True)[:count]] = 1
    return mask.view_as(scores)


class Pruning(nn.Module):
    """The mask of one layer.

    Args:
        what: what is left out: single weights, rows (outputs), heads of an attention's output projection
            (groups of its inputs), or a convolution's output channels.
        weight: the layer's weight, [out, in, ...].
        ratio: the share that stays.
        learned: whether scores decide that are trained; otherwise the magnitudes now.
        heads: the number of heads; 1 elsewhere.
    """

    mask: Tensor
    scores: nn.Parameter

    def __init__(self, what: What, weight: Tensor, ratio: float, *, learned: bool, heads: int = 1):
        super().__init__()
        self.what, self.ratio, self.heads = what, ratio, heads
        units = {"sparse_pruning": weight.shape, "head_pruning": torch.Size([heads])}.get(
            what, weight.shape[:1]
        )
        if learned:
            scores = torch.empty(units, dtype=weight.dtype, device=weight.device)
            bound = 1 / math.sqrt(scores[0].numel() if scores.dim() > 1 else len(scores))
            self.scores = nn.Parameter(scores.uniform_(-bound, bound))
        else:
            sizes = weight.detach().abs()
            if what != "sparse_pruning":
                sizes = sizes.flatten(1).sum(1)
            self.register_buffer("mask", largest(sizes, ratio))

    def kept(self) -> Tensor:
        """1 for what stays and 0 for what goes, of each weight, row, head or channel."""
        if "scores" not in self._parameters:
            return self.mask
        return straight_through(self.scores, largest(self.scores, self.ratio))

    def over(self, weight: Tensor) -> Tensor:
        """The mask in a shape that broadcasts with the weight."""
        kept = self.kept()
        if self.what == "sparse_pruning":
            return kept
        if self.what == "head_pruning":
            return kept.repeat_interleave(weight.shape[1] // self.heads)[None]
        return kept.view(-1, *[1] * (weight.dim() - 1))

    @property
    def drops_outputs(self) -> bool:
        """Whether whole outputs go, and so their biases."""
        return self.what in ("row_pruning", "channel_pruning")
