"""A key-value cache of which each of several ranks keeps a share, for prompts longer than one rank holds."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.layers.context.cached import KeptRun, SharedStore
from megazero.layers.inputs import Attends
from megazero.mpu.group import Group

_BLOCK = 1024


class SharedCache(SharedStore):
    """Keys and values by blocks of positions, dealt to the ranks in turn; those behind a window are let go.

    Args:
        sharers: the ranks.
        block: positions of a block.
    """

    def __init__(self, sharers: Group, block: int = _BLOCK):
        self.sharers, self.block = sharers, block
        self._kept: dict[int, list[KeptRun]] = {}
        self._lengths: dict[int, int] = {}
        self.states: dict[int, tuple[Tensor, ...]] = {}

    @property
    def elements(self) -> int:
        """Number of elements in this rank's memory."""
        runs = (run for kept in self._kept.values() for run in kept)
        states = sum(x.numel() for tensors in self.states.values() for x in tensors)
        return states + sum(run.keys.numel() + run.values.numel() for run in runs)

    def extend(self, attends: Attends, key: Tensor, value: Tensor) -> tuple[int, list[KeptRun]]:
        """As `SharedStore` says. What later positions see no more is let go after this one."""
        layer = attends.layer
        start = self._lengths.get(layer, 0)
        stop = self._lengths[layer] = start + len(key)
        kept, at = self._kept.setdefault(layer, []), start
        while at < stop:
            end = min(stop, (at // self.block + 1) * self.block)
            if at // self.block % self.sharers.size == self.sharers.rank:
                rows = slice(at - start, end - start)
                self._keep(kept, KeptRun(at, key[rows].clone(), value[rows].clone()))
            at = end
        seen = list(kept)
        pattern = attends.pattern
        left, _ = pattern.sides(attends.causal)
        if left >= 0 and pattern.layout is None and pattern.prefix == 0:
            oldest = stop - left
            kept[:] = [r for r in kept if r.start + len(r.keys) > oldest or r.start < pattern.sinks]
        return start, seen

    def _keep(self, kept: list[KeptRun], run: KeptRun) -> None:
        """Add a run; one that goes on in a block is joined with what is there."""
        if kept and kept[-1].start + len(kept[-1].keys) == run.start and run.start % self.block:
            last = kept.pop()
            run = KeptRun(last.start, torch.cat((last.keys, run.keys)), torch.cat((last.values, run.values)))
        kept.append(run)
