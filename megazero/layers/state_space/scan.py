"""The selective scan of Mamba-2 (Dao & Gu 2024): matrix products within chunks, states between them.

A head's state is a matrix [p, n]; each row decays it, adds to it and reads it:

    state = exp(dt a) state + dt x b^T,    y = state c
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.ops.chunks import compute_dtype

CHUNK = 64
"""Rows of a chunk, of which each head holds a matrix of all pairs (Megatron-LM has 128)."""


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor | None = None,
    segments: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Returns [s, b, g, r, p] and the state after the last row, [b, g, r, p, n], both in fp32 or wider.

    Args:
        x: the rows of g groups of r heads, [s, b, g, r, p].
        dt: the length of each row's step, [s, b, g, r], positive.
        a: the rate at which a head's state decays, [g, r], negative.
        b, c: the vectors by which a group's heads write and read, [s, b, g, n].
        state: the state before the first row; None for zeros.
        segments: int [b, s], ascending; the state is reset where the number changes. None for one segment.
        chunk: rows of a chunk.
    """
    wide, s = compute_dtype(x.dtype), len(x)
    size = min(chunk, s)
    dt = dt.to(wide)
    written = _chunks(x.to(wide) * dt.unsqueeze(-1), size).transpose(3, 4)  # [b, g, k, r, q, p]
    rates = _chunks(dt * a.to(wide), size).transpose(3, 4)  # [b, g, k, r, q]
    b, c = (_chunks(t.to(wide), size) for t in (b, c))  # [b, g, k, q, n]
    alike = _Alike.of(segments, size) if segments is not None else None

    # A product, as the cumulative sum of floats has no deterministic form on CUDA.
    total = rates @ rates.new_ones(size, size).triu()
    since = total.unsqueeze(-1) - total.unsqueeze(-2)  # from a row to an earlier one, [..., q, q]
    hidden = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    if alike is not None:
        hidden = hidden | ~alike.within
    decay = since.masked_fill(hidden, -torch.inf).exp()
    result = ((c @ b.mT).unsqueeze(3) * decay) @ written

    to_end, from_start = (total[..., -1:] - total).exp(), total.exp()
    through = from_start[..., -1]  # [b, g, k, r]
    if alike is not None:
        to_end, from_start = to_end * alike.to_end, from_start * alike.from_start
        through = through * alike.through
    added = (written * to_end.unsqueeze(-1)).mT.flatten(3, 4) @ b  # [b, g, k, r p, n]
    added = added.unflatten(3, (-1, x.shape[-1]))
    last = torch.zeros_like(added[:, :, 0]) if state is None else state.to(wide)
    before = []
    for kept, more in zip(through[..., None, None].unbind(2), added.unbind(2), strict=True):
        before.append(last)
        last = last * kept + more
    read = c @ torch.stack(before, 2).flatten(3, 4).mT  # [b, g, k, q, r p]
    read = read.unflatten(-1, written.shape[3::2]).transpose(3, 4)
    result = result + read * from_start.unsqueeze(-1)
    rows = result.permute(2, 4, 0, 1, 3, 5).flatten(0, 1)[:s]
    return rows, last


def _chunks(x: Tensor, size: int) -> Tensor:
    """[s, b, g, ...] -> [b, g, chunks, size, ...]; zero rows, which change no state, pad the last chunk.

    Their values are wherever the result needs them in memory, so this makes no copy.
    """
    short = -len(x) % size
    if short:
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, short))
    x = x.unflatten(0, (-1, size))
    return x.movedim((2, 3), (0, 1))


class _Alike:
    """Masks of pairs of rows in the same segment, broadcast over groups and heads."""

    def __init__(self, numbers: Tensor):
        """numbers: int [b, chunks, size]."""
        last = numbers[..., -1]
        entered = torch.cat((numbers[:, :1, 0], last[:, :-1]), 1)  # by the state at a chunk's start
        own = numbers[:, None, :, None]  # [b, 1, k, 1, q]
        self.within = own.unsqueeze(-1) == own.unsqueeze(-2)
        self.to_end = own == last[:, None, :, None, None]
        self.from_start = own == entered[:, None, :, None, None]
        self.through = (entered == last)[:, None, :, None]

    @classmethod
    def of(cls, segments: Tensor, size: int) -> _Alike:
        short = -segments.shape[1] % size
        filled = torch.cat((segments, segments[:, -1:].expand(-1, short)), 1)
        return cls(filled.unflatten(1, (-1, size)))
