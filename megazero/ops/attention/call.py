"""`AttentionCall`: a call of attention besides its tensors, which every implementation takes as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_

import torch
from torch import Tensor

from megazero.ops.attention.documents import Documents
from megazero.ops.dropout import AttentionDropout
from megazero.ops.positions import Positions
from megazero.ops.scaled_softmax import same_document


@dataclass(frozen=True)
class AttentionCall:
    """The keys that a query may attend to, and what becomes of its scores.

    Attributes:
        scale: the factor of the products of queries and keys.
        causal: whether a query attends only to keys up to its own row, where the last query has the last key.
        mask: bool, broadcastable to [b, n, s, t], True where the query may attend to the key; None: all.
        documents: of the keys, [b, t]; a query attends only to keys of its own; None: to all.
        bias: broadcastable to [b, n, s, t], added to the scaled scores; it may have a gradient.
        dropout: the dropout of the probabilities.
        window: the most keys before and after its own that a query attends to, -1 for no limit; None: all.
    """

    scale: float
    causal: bool = False
    mask: Tensor | None = None
    documents: Documents | None = None
    bias: Tensor | None = None
    dropout: AttentionDropout | None = None
    window: tuple[int, int] | None = None

    def allowed(self, q: Tensor, k: Tensor) -> Tensor | None:
        """One bool mask [b or 1, n or 1, s, t] of all restrictions; None if `causal` alone expresses them."""
        s, t, documents = q.shape[0], k.shape[0], self.documents
        masks = [] if self.mask is None else [self.mask]
        if documents is not None and s == t and self.window is None and not torch.compiler.is_compiling():
            masks.append(documents.causal_mask if self.causal else documents.mask)  # shared by the layers
        else:
            if documents is not None:
                masks.append(same_document(documents.ids, s))
            if self.window is not None or (self.causal and (masks or s != t)):
                masks.append(_in_window(s, t, self.sides, q.device))
        if not masks:
            return None
        mask = reduce(and_, masks)
        return mask.view((1,) * (4 - mask.dim()) + mask.shape).expand(-1, -1, s, t)

    @property
    def sides(self) -> tuple[int, int]:
        """The most keys before and after its own that a query attends to; -1 for no limit."""
        left, right = (-1, -1) if self.window is None else self.window
        return left, 0 if self.causal else right

    def of_run(self, row: int, start: int, stop: int) -> AttentionCall:
        """The same call for the tokens from `start` to `stop` of one row, which are a whole document."""
        dropout = self.dropout
        if dropout is None:
            return replace(self, documents=None)

        def own(positions: Positions) -> Positions:
            positions = positions[start:stop]
            if isinstance(positions, range) or positions.dim() == 1:  # of all rows
                return positions
            return positions[:, row : row + 1]

        keys = dropout.keys
        dropout = replace(
            dropout,
            keys=keys[row : row + 1] if keys.dim() == 1 else keys[start:stop, row : row + 1],
            query_positions=own(dropout.query_positions),
            key_positions=own(dropout.key_positions),
        )
        return replace(self, documents=None, dropout=dropout)


def _in_window(s: int, t: int, window: tuple[int, int], device: torch.device) -> Tensor:
    """bool [s, t], True for the keys of a window (before, after) around each query's own; -1 is no limit."""
    (left, right), shift = window, t - s
    allowed = torch.ones(s, t, dtype=torch.bool, device=device)
    if right >= 0:
        allowed = allowed.tril(shift + right)
    return allowed.triu(shift - left) if left >= 0 else allowed


def attention_by_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    runs: list[list[int]],
    attend: Callable[[Tensor, Tensor, Tensor, AttentionCall], Tensor],
) -> Tensor:
    """[s, b, n e]: the results of `attend` for each run of each row, so that nothing outside is computed.

    q [s, b, n, d], k [s, b, g, d] and v [s, b, g, e]. `attend` gets one run of one row, [l, 1, ...].
    """
    rows = []
    # By splits, because a slice's backward would fill a tensor of the whole size.
    samples = zip(q.split(1, 1), k.split(1, 1), v.split(1, 1), runs, strict=True)
    for i, (queries, keys, values, lengths) in enumerate(samples):
        start, parts = 0, []
        split = (queries.split(lengths), keys.split(lengths), values.split(lengths))
        for run_q, run_k, run_v in zip(*split, strict=True):
            stop = start + len(run_q)
            parts.append(attend(run_q, run_k, run_v, call.of_run(i, start, stop)))
            start = stop
        rows.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    return torch.cat(rows, 1)
