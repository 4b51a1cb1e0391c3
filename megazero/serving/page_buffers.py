"""Keys and values of many sequences in pages of one size (PagedAttention, Kwon et al. 2023).

Keys of a page are stored in panels of 16 positions, transposed, [g, page / 16, d, 16], values by positions,
[g, page, e], so that the kernels of csrc/attention multiply them where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from megazero.errors import ConfigError
from megazero.layers.attention_cores import LocalCore
from megazero.layers.inputs import Attends, AttentionCore, LayerInputs
from megazero.layers.rows import Rows
from megazero.mpu.group import Group
from megazero.ops.attention import Bias

PANEL = 16
"""Positions whose keys lie together; pages are multiples of it."""


@dataclass(frozen=True)
class Ragged:
    """The rows of one step, all sequences behind each other in one row of T tokens.

    Attributes:
        counts: rows of each sequence in this step.
        past: positions of each sequence that are in the pages already.
        tables: page numbers of each sequence, in order; enough for its past and its rows.
    """

    counts: tuple[int, ...]
    past: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]

    @cached_property
    def total(self) -> int:
        """The number of rows T."""
        return sum(self.counts)

    def slots(self, page: int) -> Tensor:
        """int64 [T]: where each row's key is kept, page * size + place in it."""
        runs = zip(self.counts, self.past, self.tables, strict=True)
        return torch.tensor(
            [table[at // page] * page + at % page for n, past, table in runs for at in range(past, past + n)],
            dtype=torch.int64,
        )


class PageBuffers:
    """The pages of all layers, each layer's made at its first keys, with their dtype and device.

    Args:
        pages: how many there are.
        page: positions of each.

    Raises:
        ConfigError: `page` is no multiple of 16.
    """

    def __init__(self, pages: int, page: int):
        if page < 1 or page % PANEL:
            raise ConfigError(
                f"`page` must be a multiple of {PANEL} positions, but is {page}; take 16, 32 or 64"
            )
        self.pages, self.page = pages, page
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def core(self, ragged: Ragged, heads: Group) -> AttentionCore:
        """The attention core of one step: keeps the rows' keys and values, and attends over the pages.

        It takes q [T, 1, n, d], k [T, 1, g, d] and v [T, 1, g, e] and returns [T, 1, n e].

        heads: the ranks that the heads are sliced over.
        """
        return _PagedCore(self, ragged, LocalCore(heads))

    def copy_page(self, source: int, target: int) -> None:
        """Copy what a page holds to another one, in all layers."""
        for kept in self._kept.values():
            for x in kept:
                x[target] = x[source]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Keep keys [T, g, d] and values [T, g, e] of a layer at `slots`, int64 [T]."""
        keys, values = self._of(layer, key, value)
        pages, places = slots // self.page, slots % self.page
        keys[pages, :, places // PANEL, :, places % PANEL] = key
        values[pages, :, places] = value

    def read(self, layer: int, table: tuple[int, ...], count: int) -> tuple[Tensor, Tensor]:
        """The first `count` keys [t, 1, g, d] and values [t, 1, g, e] of a sequence, copied."""
        keys, values = self._kept[layer]
        chosen = torch.tensor(table, device=keys.device)
        key = keys[chosen].permute(0, 2, 4, 1, 3).flatten(0, 2)  # [pages, page / 16, 16, g, d]
        value = values[chosen].transpose(1, 2).flatten(0, 1)
        return key[:count].unsqueeze(1), value[:count].unsqueeze(1)

    def _of(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self._kept:
            (_, g, d), (_, groups, e), panels = key.shape, value.shape, self.page // PANEL
            keys = key.new_zeros(self.pages, g, panels, d, PANEL)
            self._kept[layer] = keys, value.new_zeros(self.pages, groups, self.page, e)
        return self._kept[layer]


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
        """int64 [T]: where each row's key is kept."""
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
        self.buffers.write(attends.layer, self.slots.to(k.device), k[:, 0], v[:, 0])
        return torch.cat(list(self._each(q, inputs, attends, bias, offset)))

    def _each(
        self, q: Tensor, inputs: LayerInputs, attends: Attends, bias: Bias | None, offset: Tensor | None
    ) -> Iterator[Tensor]:
        """The context [s, 1, n e] of each sequence's rows."""
        ragged = self.ragged
        rows = q.split(ragged.counts)
        for own, past, table in zip(rows, ragged.past, ragged.tables, strict=True):
            count = past + len(own)
            kept = attends.keys_and_values(*self.buffers.read(attends.layer, table, count))
            alone = replace(inputs, rows=Rows(range(past, count)))
            yield self.core(own, *kept, alone, attends, bias, offset)
