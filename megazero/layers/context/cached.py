"""Generation's attention over keys of earlier positions, of which each rank keeps a share."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megazero.layers.collectives import gather_rows
from megazero.layers.inputs import Attends, AttentionCore, LayerInputs
from megazero.mpu.group import Group
from megazero.ops.attention import (
    AttentionCall,
    Bias,
    Part,
    forward_of_part,
    merge_part,
    with_softmax_offset,
)
from megazero.ops.chunks import compute_dtype


@dataclass(frozen=True)
class KeptRun:
    """Keys and values of adjacent positions, [t, b, g, d] and [t, b, g, e].

    Attributes:
        start: the first position.
        keys, values: their keys and values.
    """

    start: int
    keys: Tensor
    values: Tensor


class SharedStore(Protocol):
    """Keeps a share of the keys and values of earlier positions on each rank, and `states` whole on each."""

    states: dict[int, tuple[Tensor, ...]]

    @abstractmethod
    def extend(self, attends: Attends, key: Tensor, value: Tensor) -> tuple[int, list[KeptRun]]:
        """Add [s, b, g, d] of a layer, which every rank has.

        Returns the position of the first row, and this rank's runs of all positions so far, in order.
        """


@dataclass(frozen=True)
class SharedCacheCore(AttentionCore):
    """Attention of rows that every rank has over keys of which each rank keeps a share.

    Each rank attends to its own keys, and the results are merged by their log-sum-exp. So a prompt may be as
    long as the memory of all ranks allows. Nothing is recorded for a backward pass.

    Attributes:
        store: keys and values by layer.
        sharers: the ranks that keep the others.
    """

    store: SharedStore
    sharers: Group

    @property
    def mixer_states(self) -> dict[int, tuple[Tensor, ...]]:
        return self.store.states

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
        start, runs = self.store.extend(attends, k, v)
        (s, b, n, _), wide = q.shape, compute_dtype(q.dtype)
        width = attends.keys_and_values(k[:1], v[:1])[1].shape[-1]
        out = torch.zeros(s, b, n, width, dtype=wide, device=q.device)
        lse = torch.full((b, n, s), -torch.inf, dtype=wide, device=q.device)
        for run in runs:
            call = AttentionCall(
                attends.scale_of(q),
                bias=bias,
                pattern=attends.pattern.causally(attends.causal),
                part=Part(start, run.start),
            )
            keys, values = attends.keys_and_values(run.keys, run.values)
            merge_part(out, lse, *forward_of_part(q, keys, values, call))
        parts = (gather_rows(x.unsqueeze(0), self.sharers) for x in (out, lse))
        first, *others = zip(*(x.unbind() for x in parts), strict=True)
        out, lse = (x.clone() for x in first)
        for other in others:
            merge_part(out, lse, *other)
        result = out.flatten(2).to(q.dtype)
        return result if offset is None else with_softmax_offset(result, lse, offset)
