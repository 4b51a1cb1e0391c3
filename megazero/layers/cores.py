"""Attention cores: from queries, keys and values of this rank's rows to their context.

A core is a value, as the product of a linear layer is: `core_of` chooses it by the placement, and a pass may
bring another one, as generation does. Where keys lie on several ranks, a core is the place that knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megazero.layers.inputs import Attends, AttentionCore, LayerInputs
from megazero.layers.patterns import seen_by_wanted
from megazero.layers.placement import Placement
from megazero.layers.rows import Rows, keys_at
from megazero.mpu.group import Group
from megazero.ops.attention import ALL, attention
from megazero.ops.dropout import AttentionDropout


class KeyValueStore(Protocol):
    """Keys and values of earlier positions, kept between generation steps."""

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append [s, b, g, d] of `layer` and return all positions so far, [t, b, g, d]."""


@dataclass(frozen=True)
class LocalCore(AttentionCore):
    """Attention over rows that this rank has whole.

    Attributes:
        heads: the ranks that the heads are sliced over.
    """

    heads: Group

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: LayerInputs, attends: Attends, bias: Tensor | None
    ) -> Tensor:
        dropout = self._dropout(q.shape[2], inputs, attends)
        mask, documents = None, inputs.rows.documents
        if inputs.wanted is not None:
            assert not attends.causal, "causality counts the queries from the last key"
            mask, documents = _mask_of_wanted(inputs.rows, inputs.wanted), None
            seen = seen_by_wanted(attends.pattern, inputs.wanted, len(k))
            mask = seen if mask is None else mask if seen is None else mask & seen
        return attention(
            inputs.narrow(q),
            k,
            v,
            causal=attends.causal,
            mask=mask,
            document_ids=documents,
            bias=bias,
            dropout=dropout,
            pattern=attends.pattern if inputs.wanted is None else ALL,
        )

    def _dropout(self, heads: int, inputs: LayerInputs, attends: Attends) -> AttentionDropout | None:
        """The dropout of the probabilities of this rank's `heads` heads, over all rows."""
        rows, wanted = inputs.rows, inputs.wanted
        if rows.keys is None or attends.dropout == 0.0:
            return None
        keys = keys_at(inputs.keys_of(attends.layer, "attention"), wanted)
        queries, first = rows.positions_at(wanted), self.heads.rank * heads
        return AttentionDropout(attends.dropout, keys, queries, rows.positions, first)


@dataclass(frozen=True)
class CachedCore(AttentionCore):
    """Attention over the rows and all earlier ones of their sequences, whose keys and values are in a store.

    Attributes:
        store: keys and values by layer.
        core: attention over what is then there.
    """

    store: KeyValueStore
    core: AttentionCore

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: LayerInputs, attends: Attends, bias: Tensor | None
    ) -> Tensor:
        k, v = self.store.extend(attends.layer, k, v)
        return self.core(q, k, v, inputs, attends, bias)


def core_of(placement: Placement) -> AttentionCore:
    """The core of layers at a placement."""
    return LocalCore(placement.tp)


def _mask_of_wanted(rows: Rows, wanted: Tensor) -> Tensor | None:
    """bool [b, 1, r, s]: which rows the wanted ones, int64 [r, b], may attend to; None if all."""
    if rows.documents is None:
        return None
    ids = rows.documents.ids
    return (ids.gather(1, wanted.t()).unsqueeze(-1) == ids.unsqueeze(1)).unsqueeze(1)
