"""`AttentionCall`: a call of attention besides its tensors, which every implementation takes as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_

import torch
from torch import Tensor

from megazero.ops.attention.documents import Documents
from megazero.ops.attention.pattern import ALL, Pattern
from megazero.ops.dropout import AttentionDropout
from megazero.ops.positions import Positions
from megazero.ops.scaled_softmax import same_document


@dataclass(frozen=True, eq=False)
class Slopes:
    """Linear biases: a score gets slope times (key's place - query's) (ALiBi, Press et al. 2022).

    Attributes:
        by_head: float32 [n], the slope of each head.
    """

    by_head: Tensor


@dataclass(frozen=True, eq=False)
class Part:
    """Where the queries and keys of a call lie in their sequence, if the call has parts of it.

    Attributes:
        query, key: the places of the first query and of the first key.
        query_ids: int [b, s], the documents of the queries; None: those of the last s keys.
    """

    query: int
    key: int
    query_ids: Tensor | None = None


@dataclass(frozen=True)
class AttentionCall:
    """The keys that a query may attend to, and what becomes of its scores.

    Attributes:
        scale: the factor of the products of queries and keys.
        causal: whether a query attends only to keys up to its own row, where the last query has the last key.
        mask: bool, broadcastable to [b, n, s, t], True where the query may attend to the key; None: all.
        documents: of the keys, [b, t]; a query attends only to keys of its own; None: to all.
        bias: broadcastable to [b, n, s, t], added to the scaled scores; it may have a gradient. Or `Slopes`.
        dropout: the dropout of the probabilities.
        pattern: which keys a query may attend to by its place.
        part: where queries and keys lie in their sequence; None: the keys are the sequence from its
            beginning, and the last query has the last key.
    """

    scale: float
    causal: bool = False
    mask: Tensor | None = None
    documents: Documents | None = None
    bias: Tensor | Slopes | None = None
    dropout: AttentionDropout | None = None
    pattern: Pattern = ALL
    part: Part | None = None

    def allowed(self, q: Tensor, k: Tensor) -> Tensor | None:
        """One bool mask [b or 1, n or 1, s, t] of all restrictions; None if `causal` alone expresses them."""
        s, t, documents = q.shape[0], k.shape[0], self.documents
        masks = [] if self.mask is None else [self.mask]
        plain = self.pattern.idle and self.part is None
        if documents is not None and s == t and plain and not torch.compiler.is_compiling():
            masks.append(documents.causal_mask if self.causal else documents.mask)  # shared by the layers
        else:
            begins = None
            if documents is not None:
                masks.append(self._same_document(documents, s))
                if self.pattern.sinks:
                    assert self.part is None, "the sinks of documents are known where their keys are whole"
                    begins = documents.bounds[0]
            if not self.pattern.idle or (self.causal and (masks or s != t or self.part is not None)):
                queries, keys = self.places(s, t)
                masks += _given(self.pattern.allowed(self.causal, queries, keys, q.device, begins))
        if not masks:
            return None
        mask = reduce(and_, masks)
        return mask.view((1,) * (4 - mask.dim()) + mask.shape).expand(-1, -1, s, t)

    @property
    def by_mask(self) -> bool:
        """Whether kernels need a mask to know which keys a query may attend to."""
        pattern = self.pattern
        special = pattern.sinks > 0 or pattern.prefix > 0 or pattern.layout is not None
        return special or self.part is not None

    def masked(self, q: Tensor, k: Tensor) -> AttentionCall:
        """The call with all its restrictions in its mask, if there is no other way."""
        if not self.by_mask:
            return self
        return replace(
            self,
            mask=self.allowed(q, k),
            causal=False,
            documents=None,
            pattern=ALL,
            part=None,
            bias=self.biases(q.shape[0], k.shape[0]),
        )

    def places(self, s: int, t: int) -> tuple[range, range]:
        """The places of s queries and t keys in their sequence."""
        query, key = (t - s, 0) if self.part is None else (self.part.query, self.part.key)
        return range(query, query + s), range(key, key + t)

    @property
    def sides(self) -> tuple[int, int]:
        """The most keys before and after its own that a query attends to; -1 for no limit."""
        return self.pattern.sides(self.causal)

    def biases(self, s: int, t: int) -> Tensor | None:
        """All that is added to the scaled scores, broadcastable to [b, n, s, t]."""
        if not isinstance(self.bias, Slopes):
            return self.bias
        by_head = self.bias.by_head
        q, k = (torch.arange(x.start, x.stop, device=by_head.device) for x in self.places(s, t))
        return by_head.view(-1, 1, 1) * (k - q.unsqueeze(1))

    def _same_document(self, documents: Documents, s: int) -> Tensor:
        ids = None if self.part is None else self.part.query_ids
        if ids is None:
            return same_document(documents.ids, s)
        return ids[:, None, :, None] == documents.ids[:, None, None, :]

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


def _given(mask: Tensor | None) -> list[Tensor]:
    return [] if mask is None else [mask]


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
