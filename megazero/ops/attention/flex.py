"""Attention by torch's FlexAttention, for patterns that our own kernels on a GPU do not know.

When compiled, it skips tiles that no query may see, forward and backward (Dong et al. 2024). These tiles are
determined once for each pattern and length, one row of tiles at a time, so that no tensor of all pairs is
made.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megazero.ops.attention.call import AttentionCall, Part, Slopes, Softcap, over_pairs
from megazero.ops.attention.pattern import Pattern
from megazero.ops.compiler import compiles_every_length

TILE = 128  # a smaller one is slow, and a layout's block of this size is a whole tile
CHANNELS = 16  # that the compiled kernels need at least
_Allows = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # sample, head, query, key -> bool


def flex_compiles() -> bool:
    """Whether torch can compile it; uncompiled, it would hold all scores."""
    return importlib.util.find_spec("triton") is not None


def tiles_of(pattern: Pattern, queries: range, keys: range, device: torch.device) -> tuple[Tensor, Tensor]:
    """bool [n or 1, tiles of queries, tiles of keys], twice: is any pair of a tile allowed, and are all."""
    some, every = [], []
    missing = -len(keys) % TILE
    for start in range(0, len(queries), TILE):
        rows = queries[start : start + TILE]
        allowed = pattern.allowed(False, rows, keys, device)
        if allowed is None:
            allowed = torch.ones(len(rows), len(keys), dtype=torch.bool, device=device)
        allowed = F.pad(allowed.expand(1, -1, -1) if allowed.dim() == 2 else allowed, (0, missing))
        tiles = allowed.unflatten(-1, (-1, TILE))  # [n or 1, rows, tiles of keys, TILE]
        some.append(tiles.any(-1).any(1))
        every.append(tiles.all(-1).all(1) & (len(rows) == TILE))
    return torch.stack(some, 1), torch.stack(every, 1)


def allows(call: AttentionCall, s: int, t: int, device: torch.device) -> _Allows:
    """The restrictions of a call of s queries and t keys, as FlexAttention wants them: a pair at a time."""
    (queries, keys), pattern, documents = call.places(s, t), call.pattern, call.documents
    (left, right), layout, size = pattern.sides(), None, 1
    if pattern.layout is not None:
        layout, size = pattern.layout.blocks.to(device), pattern.layout.size
    ids = None if documents is None else (call.query_ids(s), documents.ids)
    begins = call.begins if pattern.sinks else None
    mask = None if call.mask is None else over_pairs(call.mask, s, t)

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        q, k = i + queries.start, j + keys.start
        visible = q == q
        if right >= 0:
            visible = (k - q <= right) | ((q < pattern.prefix) & (k < pattern.prefix))
        if left >= 0:
            first = 0 if begins is None else begins[b, j]
            visible = visible & ((q - k <= left) | (k - first < pattern.sinks))
        if layout is not None:
            visible = visible & layout[h if len(layout) > 1 else 0, q // size, k // size]
        if ids is not None:
            visible = visible & (ids[0][b, i] == ids[1][b, j])
        if mask is not None:
            visible = visible & mask[b if len(mask) > 1 else 0, h if mask.shape[1] > 1 else 0, i, j]
        return visible

    return allowed


class _Flex:
    """FlexAttention in this process: compiled when it is first called, and the masks of its last patterns."""

    def __init__(self) -> None:
        self._by_place = lru_cache(maxsize=16)(_block_mask_by_place)

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        compiles_every_length()  # uncompiled it would hold all scores
        return torch.compile(flex_attention, dynamic=False)

    def block_mask(self, call: AttentionCall, s: int, t: int, device: torch.device) -> BlockMask:
        """The tiles to compute, and the pairs within them."""
        if call.documents is None and call.mask is None:
            return self._by_place(call.pattern, *call.places(s, t), device)
        return _block_mask(call, s, t, device)


def _block_mask_by_place(pattern: Pattern, queries: range, keys: range, device: torch.device) -> BlockMask:
    part = Part(queries.start, keys.start)
    return _block_mask(AttentionCall(1.0, pattern=pattern, part=part), len(queries), len(keys), device)


def _block_mask(call: AttentionCall, s: int, t: int, device: torch.device) -> BlockMask:
    pattern = call.pattern
    if call.documents is not None and pattern.sinks:  # anywhere, so a window hides no tile
        pattern = Pattern((-1, call.sides[1]), prefix=pattern.prefix, layout=pattern.layout)
    some, every = tiles_of(pattern, *call.places(s, t), device)
    # In tiles that are called full nobody asks `allowed`, and places are not all that restricts here.
    full = every if call.documents is None and call.mask is None else torch.zeros_like(every)
    lists = [_listed(tiles) for tiles in (some & ~full, full)]
    return BlockMask.from_kv_blocks(
        *lists[0],
        *lists[1],
        BLOCK_SIZE=TILE,
        mask_mod=allows(call, s, t, device),
        seq_lengths=(s, t),
    )


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """The number of tiles in each row, and which: int32 [1, n or 1, rows] and [1, n or 1, rows, tiles]."""
    order = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1).to(torch.int32).unsqueeze(0), order.to(torch.int32).unsqueeze(0)


def _modified(call: AttentionCall, shift: int) -> Callable[..., Tensor] | None:
    """The scores within their bound or with biases by distance, as FlexAttention asks for them."""
    bias = call.bias
    if isinstance(bias, Softcap):
        return lambda score, b, h, i, j: bias.of(score)
    if not isinstance(bias, Slopes):
        return None
    by_head = bias.by_head
    return lambda score, b, h, i, j: score + by_head[h] * (j - i - shift)


_FLEX = _Flex()


def attention_flex(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, attend: Callable[..., Any] | None = None
) -> tuple[Tensor, None]:
    """Attention without dropout; `attend` stands for the compiled function in tests."""
    (s, b, n, d), t = q.shape, k.shape[0]
    short = max(0, CHANNELS - d)  # channels of zeros change neither scores nor results
    heads = [(F.pad(x, (0, short)) if short else x).permute(1, 2, 0, 3) for x in (q, k, v)]
    mask = _FLEX.block_mask(call, s, t, q.device)
    out: Tensor = (attend or _FLEX.compiled)(
        *heads,
        score_mod=_modified(call, call.shift(s, t)),
        block_mask=mask,
        scale=call.scale,
        enable_gqa=k.shape[2] != n,
    )
    return out[..., :d].permute(2, 0, 1, 3).reshape(s, b, -1), None
