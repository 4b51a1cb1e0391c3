"""Keys and values in integers of 8 bits: keys by channel, values by position (KIVI, Liu et al. 2024).

Some channels of keys are large at all positions, so each channel has a scale of its own for a block of
positions, and a value one for each position. A block is encoded when it is full: a row attends to earlier
blocks by their codes and to its own as it is. What it sees follows from its position alone, however the
sequence is cut into steps and whatever is computed beside it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megazero.layers.inputs import Attends, AttentionCore, LayerInputs
from megazero.layers.rows import Rows
from megazero.ops.attention import Bias

CACHE_DTYPES = ("auto", "int8")
"""Values of `--kv-cache-dtype`: the model's dtype, or codes of 8 bits."""
BLOCK = 32
"""Positions whose keys share scales, where there are no pages."""
SCALE_BYTES = 4
_LARGEST = 127

_Pair = tuple[Tensor, Tensor]


def encoded(x: Tensor, *dims: int) -> _Pair:
    """Codes of x, int8, and float32 scales, each of the numbers along `dims`, which have size 1 there.

    A scale is the largest magnitude / 127, or 1 for zeros. One that is not finite makes its numbers NaN.
    """
    x = x.float()
    scales = x.abs().amax(dims, keepdim=True) / _LARGEST
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    return (x / scales).round().clamp(-_LARGEST, _LARGEST).to(torch.int8), scales


def decoded(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of codes and scales."""
    return codes.float().mul_(scales).to(dtype)


class GrowingRun:
    """Keys and values of adjacent positions of a layer.

    Args:
        start: the first position; a multiple of `BLOCK` for codes.
        coded: whether full blocks are encoded; else all stay as they are.
    """

    def __init__(self, start: int = 0, *, coded: bool = False):
        self.start = self.stop = start
        self.coded = coded
        self._blocks: list[Tensor] = []  # codes and scales of keys and of values, [n, block, b, g, d]
        self._last: list[Tensor] = []  # keys and values

    @property
    def tensors(self) -> list[Tensor]:
        """All that is in memory."""
        return self._blocks + self._last

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add rows [s, b, g, d] and [s, b, g, e], of one block if they are to be encoded."""
        pair = [key, value]
        self._last = [torch.cat(both) for both in zip(self._last, pair, strict=True)] if self._last else pair
        self.stop, self._dtype = self.stop + len(key), key.dtype

    def read(self) -> _Pair:
        """All keys and values, [t, b, g, d] and [t, b, g, e]."""
        blocks = zip(self._blocks[::2], self._blocks[1::2], strict=True)
        earlier = [decoded(*block, self._dtype).flatten(0, 1) for block in blocks]
        if earlier and self._last:
            earlier = [torch.cat(both) for both in zip(earlier, self._last, strict=True)]
        keys, values = earlier or self._last
        return keys, values

    def settle(self, left: int = -1, sinks: int = 0) -> None:
        """Encode the last block if it is full, and drop blocks of codes that no later position sees.

        Args:
            left: the earlier positions that a later one sees; negative for all.
            sinks: the first positions, which all see.
        """
        if not self.coded or not self._last or self.stop % BLOCK:
            return
        key, value = (x.unsqueeze(0) for x in self._last)
        blocks, self._last = [*encoded(key, 1), *encoded(value, 4)], []
        if self._blocks:
            n = len(self._blocks[0])
            first = min(-(-sinks // BLOCK), n)
            later = first if left < 0 else max(first, ((n + 1) * BLOCK - left) // BLOCK)
            pairs = zip(self._blocks, blocks, strict=True)
            blocks = [torch.cat((old[:first], old[later:], new)) for old, new in pairs]
        self._blocks = blocks


@dataclass(frozen=True)
class BlockwiseCore(AttentionCore):
    """Attention block by block, for a store that encodes the blocks before.

    Attributes:
        core: attends over the rows of one block and all before them.
    """

    core: AttentionCore

    @property
    def mixer_states(self) -> MutableMapping[int, tuple[Tensor, ...]]:
        return self.core.mixer_states

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        inputs: LayerInputs,
        attends: Attends,
        bias: Bias | None,
        offset: Tensor | None = None,
    ) -> Tensor:
        positions = inputs.rows.positions
        assert isinstance(positions, range), "generation feeds adjacent positions"
        edges = [positions.start, *range((positions.start // BLOCK + 1) * BLOCK, positions.stop, BLOCK)]
        out = []
        for start, stop in zip(edges, [*edges[1:], positions.stop], strict=True):
            rows = slice(start - positions.start, stop - positions.start)
            own = replace(inputs, rows=Rows(range(start, stop)))
            out.append(self.core(q[rows], k[rows], v[rows], own, attends, bias, offset))
        return torch.cat(out)
