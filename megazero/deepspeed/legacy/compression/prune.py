"""Masks that prune weights, rows, heads or channels of a layer.

The choice is by magnitude (``l1``), or by trained scores with straight-through gradients (``topk``; movement
pruning, Sanh et al. 2020).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from megazero.deepspeed.legacy.compression.quantize import straight_through

PruningKind = Literal["sparse_pruning", "row_pruning", "head_pruning", "channel_pruning"]


@torch.no_grad()
def largest(scores: Tensor, ratio: float) -> Tensor:
    """Return 1 at the ceil(ratio * n) largest of n scores and 0 elsewhere, in their shape and dtype."""
    count = math.ceil(ratio * scores.numel())
    mask = torch.zeros_like(scores).view(-1)
    mask[scores.reshape(-1).float().argsort(descending=True, stable=True)[:count]] = 1
    return mask.view_as(scores)


class Pruning(nn.Module):
    """The pruning mask of one layer.

    Args:
        kind: prunes single weights, rows (outputs), heads of an attention's output projection (groups of its
            inputs), or a convolution's output channels.
        weight: the layer's weight, [out, in, ...].
        ratio: the share that is kept.
        learned: whether trained scores decide; otherwise the present magnitudes.
        heads: the number of heads, for head pruning.
    """

    mask: Tensor
    scores: nn.Parameter

    def __init__(self, kind: PruningKind, weight: Tensor, ratio: float, *, learned: bool, heads: int = 1):
        super().__init__()
        self.kind, self.ratio, self.heads = kind, ratio, heads
        shapes = {"sparse_pruning": weight.shape, "head_pruning": torch.Size([heads])}
        shape = shapes.get(kind, weight.shape[:1])
        if learned:
            scores = torch.empty(shape, dtype=weight.dtype, device=weight.device)
            bound = 1 / math.sqrt(scores[0].numel() if scores.dim() > 1 else len(scores))
            self.scores = nn.Parameter(scores.uniform_(-bound, bound))
        else:
            magnitudes = weight.detach().abs()
            if kind != "sparse_pruning":
                magnitudes = magnitudes.flatten(1).sum(1)
            self.register_buffer("mask", largest(magnitudes, ratio))

    def kept(self) -> Tensor:
        """Return 1 for each weight, row, head or channel that is kept, and 0 for each that is pruned."""
        if "scores" not in self._parameters:
            return self.mask
        return straight_through(self.scores, largest(self.scores, self.ratio))

    def mask_for(self, weight: Tensor) -> Tensor:
        """Return the mask in a shape that broadcasts with the weight."""
        kept = self.kept()
        if self.kind == "sparse_pruning":
            return kept
        if self.kind == "head_pruning":
            return kept.repeat_interleave(weight.shape[1] // self.heads)[None]
        return kept.view(-1, *[1] * (weight.dim() - 1))

    @property
    def drops_outputs(self) -> bool:
        """Whether whole outputs are pruned, with their biases."""
        return self.kind in ("row_pruning", "channel_pruning")
