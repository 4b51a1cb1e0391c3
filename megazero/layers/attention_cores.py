"""Attention cores: from queries, keys and values of this rank's rows to their context.

A core is a value: `core_of` chooses a layer's by the placement, and a pass may bring another one, as
generation does. Only cores know whether keys lie on several ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megazero.layers.context.core import ExchangingCore, GatheringCore
from megazero.layers.inputs import Attends, AttentionCore, LayerInputs
from megazero.layers.placement import Placement
from megazero.layers.rows import Rows
from megazero.mpu.group import Group
from megazero.mpu.solo_group import SoloGroup
from megazero.ops.attention import ALL, AttentionCall, Bias, Slopes, attend
from megazero.ops.positions import Positions, position_tensor


class KeyValueStore(Protocol):
    """Keeps keys and values of earlier positions between generation steps, and `states` of layers without
    keys.
    """

    states: dict[int, tuple[Tensor, ...]]

    def extend(self, attends: Attends, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append [s, b, g, d] of a layer; return them with all earlier ones that it still attends to.

        The result is [t, b, g, d], in order; the layer's pattern applies to it as to the whole sequence.
        """


@dataclass(frozen=True)
class LocalCore(AttentionCore):
    """Attention over rows that this rank has whole.

    Attributes:
        heads: the ranks that the heads are sliced over.
    """

    heads: Group

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
        rows, wanted, pattern = inputs.rows, inputs.wanted, attends.pattern
        mask, documents = None, rows.documents
        chosen = not isinstance(rows.positions, range)  # by random-LTD, or packed, or both
        if wanted is not None or (chosen and (pattern != ALL or isinstance(bias, Slopes))):
            keys = _as_columns(rows.positions, q.device)
            queries = _as_columns(rows.positions_at(wanted), q.device)
            mask = _mask_by_places(attends, rows, wanted, queries, keys)
            documents, pattern = None, ALL
            if isinstance(bias, Slopes):
                bias = bias.by_head.view(-1, 1, 1) * (keys.mT - queries)
        else:
            pattern = pattern.causally(attends.causal)
        dropout = inputs.attention_dropout(attends, self.heads.rank * q.shape[2])
        call = AttentionCall(attends.scale_of(q), mask, documents, bias, dropout, pattern)
        q = inputs.narrow(q)
        attends.see(q, k, call)
        return attend(q, k, v, call, offset)


@dataclass(frozen=True)
class CachedCore(AttentionCore):
    """Attention over the rows and all earlier positions, whose keys and values a store keeps.

    Attributes:
        store: keys and values by layer.
        core: computes the attention over all of them.
    """

    store: KeyValueStore
    core: AttentionCore

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
        k, v = attends.keys_and_values(*self.store.extend(attends, k, v))
        return self.core(q, k, v, inputs, attends, bias, offset)


def core_of(placement: Placement, layer: int) -> AttentionCore:
    """The core of a layer at a placement."""
    groups, zigzag, tp = placement.groups, placement.cut.zigzag, placement.tp
    sharers = groups["cp"]
    if sharers.size == 1:
        return LocalCore(tp)
    kind = placement.cut.type_of(layer)
    if kind == "all_gather":
        return GatheringCore(tp, sharers, zigzag)
    alone = SoloGroup("cp", sharers.ranks[sharers.rank])
    if kind == "a2a":
        return ExchangingCore(tp, sharers, alone, zigzag)
    if kind == "p2p":
        return ExchangingCore(tp, alone, sharers, zigzag)
    return ExchangingCore(tp, groups["cp_inner"], groups["cp_outer"], zigzag)


def _as_columns(positions: Positions, device: torch.device) -> Tensor:
    """int64 [1 or b, 1, s, 1]: places of rows, [s] or [s, b]."""
    places = position_tensor(positions, device)
    return (places.unsqueeze(0) if places.dim() == 1 else places.t())[:, None, :, None]


def _mask_by_places(
    attends: Attends, rows: Rows, wanted: Tensor | None, queries: Tensor, keys: Tensor
) -> Tensor | None:
    """bool [b or 1, n or 1, r, s]: which rows those at `queries` may attend to; None if all.

    Args:
        attends: the layer's settings.
        rows: all rows, which are the keys.
        wanted: int64 [r, b], the rows that are the queries; None: all.
        queries, keys: their places, [b or 1, 1, r or s, 1].
    """
    mask = attends.pattern.between(attends.causal, queries, keys.mT)
    if rows.documents is None:
        return mask
    ids = rows.documents.ids
    own = ids if wanted is None else ids.gather(1, wanted.t())
    same = (own.unsqueeze(-1) == ids.unsqueeze(1)).unsqueeze(1)
    return same if mask is None else same & mask
