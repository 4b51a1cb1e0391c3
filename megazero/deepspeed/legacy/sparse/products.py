"""`MatMul` and `Softmax` of block-sparse matrices.

A sparse matrix is [b, blocks, block, block]: the values of the blocks that its layout selects, in the order
of ``layout.nonzero()`` (head, row of blocks, column of blocks).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megazero.deepspeed.legacy.sparse.attention import MaskMode

Mode = Literal["sdd", "dsd", "dds"]


class MatMul:
    """A matrix product with one block-sparse matrix: the result (sdd), the first (dsd) or the second (dds).

    Args:
        layout: [n, N, N], nonzero where the sparse matrix has a block.
        block: the number of rows in a block.
        mode: which matrix is sparse.
        trans_a, trans_b: whether `a` or `b` is transposed first.

    Raises:
        ValueError: the mode is unknown.
    """

    def __init__(self, layout: Tensor, block: int, mode: Mode, trans_a: bool = False, trans_b: bool = False):
        if mode not in ("sdd", "dsd", "dds"):
            raise ValueError(f"`mode` must be sdd, dsd or dds, but is {mode}; choose one")
        self.layout, self.block, self.mode, self.trans_a, self.trans_b = layout, block, mode, trans_a, trans_b

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a b: [b, n, rows, columns], or [b, blocks, block, block] for mode sdd."""
        heads, rows, columns = _block_indices(self.layout, a.device)
        a, b = (x.transpose(-1, -2) if t else x for x, t in ((a, self.trans_a), (b, self.trans_b)))
        size, count = self.block, self.layout.shape[1]
        if self.mode == "sdd":
            left = a.unflatten(2, (count, size))[:, heads, rows]
            right = b.unflatten(3, (count, size)).movedim(3, 2)[:, heads, columns]
            product: Tensor = left @ right
            return product
        heads_and_blocks = self.layout.shape[0] * count
        if self.trans_a if self.mode == "dsd" else self.trans_b:  # of the sparse matrix
            rows, columns = columns, rows
        if self.mode == "dsd":
            pieces: Tensor = a @ b.unflatten(2, (count, size))[:, heads, columns]
            total = pieces.new_zeros(len(a), heads_and_blocks, size, pieces.shape[-1])
            total = total.index_add(1, heads * count + rows, pieces)
            return total.view(len(a), -1, count * size, pieces.shape[-1])
        pieces = a.unflatten(3, (count, size)).movedim(3, 2)[:, heads, rows] @ b
        total = pieces.new_zeros(len(a), heads_and_blocks, pieces.shape[2], size)
        total = total.index_add(1, heads * count + columns, pieces)
        return total.view(len(a), -1, count, pieces.shape[2], size).movedim(2, 3).flatten(3)


class Softmax:
    """The softmax over the rows of block-sparse scores; a fully masked row gives zeros.

    Args:
        layout: [n, N, N], nonzero where the scores have a block.
        block: the number of rows in a block.
    """

    def __init__(self, layout: Tensor, block: int):
        self.layout, self.block = layout, block

    def __call__(
        self,
        x: Tensor,
        scale: float = 1.0,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask_mode: MaskMode = "add",
        attn_mask_mode: MaskMode = "add",
    ) -> Tensor:
        """Return the probabilities, [b, blocks, block, block].

        Args:
            x: the scores, [b, blocks, block, block].
            scale: multiplies the scores.
            rpe: broadcastable to [b, n, s, s], added to the scaled scores.
            key_padding_mask: [b, s].
            attn_mask: [s, s].
            key_padding_mask_mode, attn_mask_mode: ``add`` adds the mask, ``mul`` hides keys where it is 0.
        """
        heads, rows, columns = _block_indices(self.layout, x.device)
        n, count, size = *self.layout.shape[:2], self.block
        scores = x * scale
        if rpe is not None:
            whole = rpe.expand(len(x), n, count * size, count * size)
            scores = scores + whole.unflatten(3, (count, size)).unflatten(2, (count, size))[
                :, heads, rows, :, columns
            ].movedim(0, 1)
        if key_padding_mask is not None:
            keys = key_padding_mask.unflatten(1, (count, size))[:, columns].unsqueeze(2)
            scores = _masked(scores, keys, key_padding_mask_mode)
        if attn_mask is not None:
            blocks = attn_mask.unflatten(1, (count, size)).unflatten(0, (count, size))[rows, :, columns]
            scores = _masked(scores, blocks, attn_mask_mode)
        line = heads * count + rows
        highest = scores.new_full((len(x), n * count, size), float("-inf"))
        peaks = scores.detach().amax(-1)
        highest = highest.scatter_reduce(1, line.view(1, -1, 1).expand_as(peaks), peaks, "amax")
        shift = highest.masked_fill(highest == float("-inf"), 0.0)
        weights = (scores - shift[:, line].unsqueeze(-1)).exp()
        total = torch.zeros_like(highest).index_add(1, line, weights.sum(-1))
        total = total.masked_fill(total == 0, 1.0)
        return weights / total[:, line].unsqueeze(-1)


def _block_indices(layout: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the head, the row and the column of each block, int64 [blocks] each."""
    heads, rows, columns = layout.to(device).nonzero().unbind(1)
    return heads, rows, columns


def _masked(scores: Tensor, mask: Tensor, mode: MaskMode) -> Tensor:
    return scores + mask if mode == "add" else scores.masked_fill(mask == 0, float("-inf"))
