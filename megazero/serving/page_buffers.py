"""Keys and values of many sequences in pages of one size (PagedAttention, Kwon et al. 2023).

Keys of a page are stored in panels of 16 positions, transposed, [g, page / 16, d, 16], values by positions,
[g, page, e], so that the kernels of csrc/attention multiply them where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from megazero.layers.attention_cores import LocalCore
from megazero.layers.inputs import Attends, AttentionCore, LayerInputs
from megazero.layers.rows import Rows
from megazero.mpu.group import Group
from megazero.ops.attention import Bias, Slopes
from megazero.ops.native import NATIVE, NATIVE_DTYPES, address, adjacent, available, heads_of

_CPU = torch.device("cpu")
PANEL = 16
"""Positions whose keys lie together; pages are multiples of it."""


def on_device(device: torch.device, *lists: Sequence[int]) -> tuple[Tensor, ...]:
    """Lists of numbers as int64 tensors on a device, where they arrive in one copy."""
    numbers = [number for one in lists for number in one]
    return tuple(torch.tensor(numbers, dtype=torch.int64, device=device).split([*map(len, lists)]))


@dataclass(frozen=True)
class Ragged:
    """The rows of one step, all sequences behind each other in one row of T tokens.

    Attributes:
        counts: rows of each sequence in this step.
        past: positions of each sequence that are in the pages already.
        tables: page numbers of each sequence, in order; enough for its past and its rows.
        device: where pages are; what all layers read of a step goes there once.
    """

    counts: tuple[int, ...]
    past: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    device: torch.device = _CPU

    @cached_property
    def steps(self) -> Tensor:
        """int64 [sequences, 2 + pages]: each one's rows, its past and its pages, as kernels take them."""
        most = max(map(len, self.tables), default=0)
        runs = zip(self.counts, self.past, self.tables, strict=True)
        rows = [(count, past, *table, *(0,) * (most - len(table))) for count, past, table in runs]
        return torch.tensor(rows, dtype=torch.int64).view(len(rows), 2 + most)

    @cached_property
    def pages(self) -> tuple[Tensor, ...]:
        """int64 [pages] of each sequence, `tables` on the device."""
        return on_device(self.device, *self.tables)

    def slots(self, page: int) -> Tensor:
        """int64 [T], on the device: where each row's key is kept, page * size + place in it."""
        runs = zip(self.counts, self.past, self.tables, strict=True)
        rows = ((table, at) for n, past, table in runs for at in range(past, past + n))
        return on_device(self.device, [table[at // page] * page + at % page for table, at in rows])[0]


class PageBuffers:
    """The pages of all layers, each layer's made at its first keys, with their dtype and device.

    Args:
        pages: how many there are.
        page: positions of each, a multiple of 16.
    """

    def __init__(self, pages: int, page: int):
        self.pages, self.page = pages, page
        self._kept: dict[int, Kept] = {}

    def core(self, ragged: Ragged, heads: Group) -> AttentionCore:
        """The attention core of one step: keeps the rows' keys and values, and attends over the pages.

        It takes q [T, 1, n, d], k [T, 1, g, d] and v [T, 1, g, e] and returns [T, 1, n e].

        heads: the ranks that the heads are sliced over.
        """
        return _PagedCore(self, ragged, LocalCore(heads))

    @property
    def bytes(self) -> int:
        """The bytes that are in memory."""
        return sum(kept.keys.nbytes + kept.values.nbytes for kept in self._kept.values())

    def forget(self, table: Sequence[int]) -> None:
        """Learn that the sequence with these pages has ended; what they hold may still be read by others."""

    def filled(
        self, layer: int, ragged: Ragged, slots: Tensor, key: Tensor, value: Tensor
    ) -> tuple[PageBuffers, Ragged]:
        """Keep the rows of a step; return the pages that its rows attend to, and where these are in them.

        Args:
            slots: where the rows are kept, int64 [T].
            key, value: [T, g, d] and [T, g, e].
        """
        self.write(layer, slots, key, value)
        return self, ragged

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Keep keys [T, g, d] and values [T, g, e] of a layer at `slots`, int64 [T]."""
        if layer not in self._kept:
            self._kept[layer] = Kept.made(self.pages, self.page, key, value)
        kept, pages, places = self._kept[layer], slots // self.page, slots % self.page
        kept.keys[pages, :, places // PANEL, :, places % PANEL] = key.to(kept.keys.dtype)
        kept.values[pages, :, places, : kept.width] = value.to(kept.values.dtype)

    def read(self, layer: int, chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The first `count` keys [t, 1, g, d] and values [t, 1, g, e] of the pages `chosen`, copied."""
        kept = self._kept[layer]
        key = kept.keys[chosen].permute(0, 2, 4, 1, 3).flatten(0, 2)  # [pages, page / 16, 16, g, d]
        value = kept.values[chosen].transpose(1, 2).flatten(0, 1)[..., : kept.width]
        return key[:count].unsqueeze(1).to(kept.dtype), value[:count].unsqueeze(1).to(kept.dtype)

    def attend(self, q: Tensor, ragged: Ragged, attends: Attends, slopes: Slopes | None) -> Tensor:
        """Attend over pages in compiled code, for a layer that `serves`: q [T, 1, n, d] -> [T, 1, n d]."""
        kept, q = self._kept[attends.layer], adjacent(q)
        (rows, _, n, d), g, steps = q.shape, kept.keys.shape[1], ragged.steps
        narrow, limits = q.dtype == torch.bfloat16, NATIVE.AttentionLimits()
        left, _ = attends.pattern.sides(True)
        sizes = rows, self.page, len(ragged.counts), n, g, d, torch.get_num_threads()
        shape = NATIVE.AttentionShape(*sizes, attends.scale_of(q), narrow, narrow)
        limits.places(0, 0, left, 0, 0)
        by_head = None if slopes is None else slopes.by_head.float().contiguous()
        if by_head is not None:
            limits.slopes(address(by_head))
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        sinks, own = attends.pattern.sinks if left >= 0 else 0, (steps, kept.keys, kept.values)
        ends = heads_of(q), heads_of(out)
        NATIVE.paged_attention(shape, limits, sinks, steps.shape[1] - 2, *map(address, own), *ends)
        return out.flatten(2)

    def serves(self, attends: Attends, bias: Bias | None, offset: Tensor | None) -> bool:
        """Whether there is compiled code for a layer's attention over its pages."""
        kept, pattern = self._kept[attends.layer], attends.pattern
        alike = kept.keys.shape[3] == kept.width and attends.unpacked is None and offset is None
        near = attends.causal and pattern.layout is None and pattern.prefix == 0
        return kept.native and alike and near and (bias is None or isinstance(bias, Slopes))


@dataclass(frozen=True)
class Kept:
    """The pages of one layer.

    Attributes:
        keys: [pages, g, page / 16, d, 16].
        values: [pages, g, page, e], or more channels.
        width: e.
        dtype: that of what is kept.
        native: whether compiled code reads them, in fp32.
    """

    keys: Tensor
    values: Tensor
    width: int
    dtype: torch.dtype
    native: bool

    @classmethod
    @torch.inference_mode(False)  # other tensors may not be written in other modes
    def made(cls, pages: int, page: int, key: Tensor, value: Tensor) -> Kept:
        """Empty pages for keys [T, g, d] and values [T, g, e]; zeros, as not all of a page is written."""
        (_, g, d), (_, groups, e) = key.shape, value.shape
        native = key.device.type == "cpu" and key.dtype in NATIVE_DTYPES and available()
        dtype, width = (torch.float32, -(-e // PANEL) * PANEL) if native else (key.dtype, e)
        keys = key.new_zeros(pages, g, page // PANEL, d, PANEL, dtype=dtype)
        return cls(keys, value.new_zeros(pages, groups, page, width, dtype=dtype), e, key.dtype, native)


@dataclass(frozen=True)
class _PagedCore(AttentionCore):
    """Attention of one step's rows over pages.

    Attributes:
        buffers: the pages.
        ragged: the rows.
        core: attends over the keys of one sequence.
    """

    buffers: PageBuffers
    ragged: Ragged
    core: AttentionCore

    @cached_property
    def slots(self) -> Tensor:
        return self.ragged.slots(self.buffers.page)

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
        buffers, ragged = self.buffers.filled(attends.layer, self.ragged, self.slots, k[:, 0], v[:, 0])
        if buffers.serves(attends, bias, offset):
            return buffers.attend(q, ragged, attends, bias if isinstance(bias, Slopes) else None)
        contexts = []
        for own, past, pages in zip(q.split(ragged.counts), ragged.past, ragged.pages, strict=True):
            count = past + len(own)
            kept = attends.keys_and_values(*buffers.read(attends.layer, pages, count))
            alone = replace(inputs, rows=Rows(range(past, count)))
            contexts.append(self.core(own, *kept, alone, attends, bias, offset))
        return torch.cat(contexts)
