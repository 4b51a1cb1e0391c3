"""`AttentionCall`: a call of attention besides its tensors, which every implementation takes as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megazero.ops.dropout import AttentionDropout
from megazero.ops.positions import Positions
from megazero.ops.scaled_softmax import may_attend, same_document

_WORTH = 1 << 14  # pairs of tokens: a call of the kernel takes about as long as this many under a mask


@dataclass(frozen=True)
class AttentionCall:
    """The keys that a query may attend to, and what becomes of its scores.

    Attributes:
        scale: the factor of the products of queries and keys.
        causal: whether a query attends only to keys up to its own row, where the last query has the last key.
        mask: bool, broadcastable to [b, n, s, t], True where the query may attend to the key; None: all.
        document_ids: int [b, t]; a query attends only to keys of its own document; None: to all.
        bias: broadcastable to [b, n, s, t], added to the scaled scores; it may have a gradient.
        dropout: the dropout of the probabilities.
    """

    scale: float
    causal: bool = False
    mask: Tensor | None = None
    document_ids: Tensor | None = None
    bias: Tensor | None = None
    dropout: AttentionDropout | None = None

    def allowed(self, q: Tensor, k: Tensor) -> Tensor | None:
        """One bool mask [b or 1, n or 1, s, t] of all restrictions; None if `causal` alone expresses them."""
        s, t, mask = q.shape[0], k.shape[0], self.mask
        if self.document_ids is not None:
            own = same_document(self.document_ids, s)
            mask = own if mask is None else mask & own
        if self.causal and (mask is not None or s != t):
            order = may_attend(s, t, q.device)
            mask = order if mask is None else mask & order
        if mask is None:
            return None
        return mask.view((1,) * (4 - mask.dim()) + mask.shape).expand(-1, -1, s, t)

    def of_run(self, row: int, start: int, stop: int) -> AttentionCall:
        """The same call for the tokens from `start` to `stop` of one row, which are a whole document."""
        dropout = self.dropout
        if dropout is None:
            return replace(self, document_ids=None)

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
        return replace(self, document_ids=None, dropout=dropout)


def document_runs(document_ids: Tensor) -> list[list[int]] | None:
    """The lengths of the runs of equal ids in each row of int [b, s].

    A dense mask costs the same however short the documents are. On CPU it pays to call the kernel once per
    document, for packed rows as for padded ones, whose padding is a document too. (On an accelerator, reading
    the ids would wait for the device.)

    None if the ids are not on the host, a document comes back after another one, or so few pairs of tokens
    would be left out that the calls would cost more than a mask.
    """
    b, s = document_ids.shape
    if document_ids.device.type != "cpu" or b * s == 0:
        return None
    runs = [torch.unique_consecutive(row, return_counts=True) for row in document_ids]
    lengths: list[list[int]] = [counts.tolist() for _, counts in runs]
    left_out = b * s * s - sum(length**2 for row in lengths for length in row)
    if left_out < _WORTH * sum(map(len, lengths)):
        return None
    return None if any(len(ids) != len(ids.unique()) for ids, _ in runs) else lengths


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
