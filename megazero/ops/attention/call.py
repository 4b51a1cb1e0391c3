"""`AttentionCall`: the options of an attention call, which every implementation takes as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_

import torch
from torch import Tensor

from megazero.ops.attention.documents import Documents
from megazero.ops.attention.pattern import ALL, CAUSAL, Pattern
from megazero.ops.dropout import AttentionDropout
from megazero.ops.positions import Positions


@dataclass(frozen=True, eq=False)
class Slopes:
    """Linear biases: slope * (key's position - query's) is added to a score (ALiBi, Press et al. 2022).

    Attributes:
        by_head: float32 [n], the slope of each head.
    """

    by_head: Tensor


@dataclass(frozen=True)
class Softcap:
    """Bounds scaled scores by c: they become c tanh(score / c) (Gemma 2, 2024)."""

    bound: float

    def of(self, scores: Tensor) -> Tensor:
        """The bounded scores."""
        return torch.tanh(scores / self.bound) * self.bound


Bias = Tensor | Slopes | Softcap
"""The biases of the scaled scores of a call, or a bound of them; both come before anything is masked."""


@dataclass(frozen=True, eq=False)
class Part:
    """Positions of a call's queries and keys, if it has only parts of their sequence.

    Attributes:
        query, key: the positions of the first query and of the first key.
        query_ids: int [b, s], the documents of the queries; None: those of the last s keys.
        begins: int [b, t], the positions at which the keys' documents begin; None: where their ids change.
    """

    query: int
    key: int
    query_ids: Tensor | None = None
    begins: Tensor | None = None


@dataclass(frozen=True)
class AttentionCall:
    """Which keys a query may attend to, and how scores and probabilities are changed.

    Attributes:
        scale: the factor of the products of queries and keys.
        mask: bool, broadcastable to [b, n, s, t], True where the query may attend to the key; None: all.
        documents: of the keys, [b, t]; a query attends only to keys of its own; None: to all.
        bias: broadcastable to [b, n, s, t], added to the scaled scores; it may have a gradient. Or `Slopes`,
            or a `Softcap` of the scores instead.
        dropout: the dropout of the probabilities.
        pattern: which keys a query may attend to by its place; causality is a part of it.
        part: where queries and keys lie in their sequence; None: the keys are the sequence from its
            beginning, and the last query has the last key.
    """

    scale: float
    mask: Tensor | None = None
    documents: Documents | None = None
    bias: Bias | None = None
    dropout: AttentionDropout | None = None
    pattern: Pattern = None  # type: ignore[assignment]  # as torch 2.11 traces no default of another class
    part: Part | None = None

    def __post_init__(self) -> None:
        if self.pattern is None:
            object.__setattr__(self, "pattern", ALL)

    @property
    def causal(self) -> bool:
        """Whether no query attends to later keys, a prefix aside."""
        return self.sides[1] == 0

    def causal_alone(self, s: int, t: int) -> bool:
        """Whether causality, with as many queries as keys, is the only restriction."""
        free = self.mask is None and self.documents is None
        return free and self.pattern == CAUSAL and s == t and self.shift(s, t) == 0

    def allowed(self, q: Tensor, k: Tensor) -> Tensor | None:
        """One bool mask [b or 1, n or 1, s, t] of all restrictions; None for none or `causal_alone`."""
        s, t, documents, pattern = q.shape[0], k.shape[0], self.documents, self.pattern
        if self.causal_alone(s, t):
            return None
        masks, begins = [self.mask], None
        if documents is not None:
            square = s == t and self.part is None and pattern in (ALL, CAUSAL)
            if square and not torch.compiler.is_compiling():
                masks.append(documents.causal_mask if self.causal else documents.mask)  # shared by the layers
                pattern = ALL
            else:
                masks.append(self.query_ids(s)[:, None, :, None] == documents.ids[:, None, None, :])
                begins = self.begins if pattern.sinks else None
        masks.append(pattern.allowed(False, *self.places(s, t), q.device, begins))
        given = [mask for mask in masks if mask is not None]
        return over_pairs(reduce(and_, given), s, t) if given else None

    def masked(self, q: Tensor, k: Tensor) -> AttentionCall:
        """The same call with all restrictions in its mask and all biases in one tensor."""
        biases = self.bias if isinstance(self.bias, Softcap) else self.biases(q.shape[0], k.shape[0])
        if self.causal_alone(q.shape[0], k.shape[0]):
            return replace(self, bias=biases, part=None)
        mask = self.allowed(q, k)
        return replace(self, mask=mask, documents=None, pattern=ALL, part=None, bias=biases)

    def simplified(self, s: int, t: int) -> AttentionCall:
        """The same call without restrictions that have no effect on s queries and t keys."""
        queries, keys = self.places(s, t)
        pattern, part = self.pattern.within(queries, keys), self.part
        if self.documents is not None and self.pattern.sinks and pattern.sides()[0] >= 0:
            pattern = replace(pattern, sinks=self.pattern.sinks)
        if part is not None and part.query_ids is None:
            placed = not pattern.idle or isinstance(self.bias, Slopes)
            if not placed or (self.shift(s, t) == t - s and not pattern.special):
                part = None
        if pattern == self.pattern and part is self.part:
            return self
        return AttentionCall(self.scale, self.mask, self.documents, self.bias, self.dropout, pattern, part)

    def query_ids(self, s: int) -> Tensor:
        """int [b, s], the documents of the queries, for a call that has documents."""
        assert self.documents is not None, "queries have no documents if keys have none"
        given = None if self.part is None else self.part.query_ids
        return self.documents.ids[:, self.documents.ids.shape[1] - s :] if given is None else given

    @property
    def begins(self) -> Tensor | None:
        """int [b, t], the places at which the keys' documents begin; None without documents."""
        if self.part is not None and self.part.begins is not None:
            return self.part.begins
        return None if self.documents is None else self.documents.bounds[0]

    def shift(self, s: int, t: int) -> int:
        """The position of the first query relative to the first key."""
        return t - s if self.part is None else self.part.query - self.part.key

    def places(self, s: int, t: int) -> tuple[range, range]:
        """The places of s queries and t keys in their sequence."""
        query, key = (t - s, 0) if self.part is None else (self.part.query, self.part.key)
        return range(query, query + s), range(key, key + t)

    @property
    def sides(self) -> tuple[int, int]:
        """The most keys before and after its own that a query attends to; -1 for no limit."""
        return self.pattern.sides()

    def biases(self, s: int, t: int) -> Tensor | None:
        """All that is added to the scaled scores, broadcastable to [b, n, s, t]."""
        if not isinstance(self.bias, Slopes):
            return None if isinstance(self.bias, Softcap) else self.bias
        by_head = self.bias.by_head
        q, k = (torch.arange(x.start, x.stop, device=by_head.device) for x in self.places(s, t))
        return by_head.view(-1, 1, 1) * (k - q.unsqueeze(1))

    def of_run(self, row: int, start: int, stop: int) -> AttentionCall:
        """The same call for the tokens `start` to `stop` of one row, a whole document."""
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


def over_pairs(mask: Tensor, s: int, t: int) -> Tensor:
    """A view [b or 1, n or 1, s, t] of a mask that is broadcastable to [b, n, s, t]."""
    return mask.view((1,) * (4 - mask.dim()) + mask.shape).expand(-1, -1, s, t)


def attention_by_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    runs: list[list[int]],
    attend: Callable[[Tensor, Tensor, Tensor, AttentionCall], Tensor],
) -> Tensor:
    """Call `attend` for each run of each row, so that nothing is computed between documents: [s, b, n e].

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
