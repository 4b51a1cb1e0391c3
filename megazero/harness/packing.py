"""Many sequences in one row of tokens without padding, where beginnings that they share are there once.

Sequences are sorted, so that a sequence shares its longest beginning with the one before it. Each adds to the
row the tokens that are new: a segment, which attends to the rows of the shared beginning and to itself. So
the choices of a question cost their own tokens, and the examples before many questions are computed once for
each row (a radix tree laid flat, as in Zheng et al. 2024, SGLang).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megazero.layers.inputs import Attends, AttentionCore, LayerInputs
from megazero.ops.attention import Bias

Ids = Sequence[int]


@dataclass(frozen=True)
class Segment:
    """Rows of a pack that continue others.

    Attributes:
        rows: the rows.
        before: the runs of rows with the earlier tokens of the sequence, in order.
    """

    rows: range
    before: tuple[range, ...]

    @property
    def start(self) -> int:
        """The position of the first row in its sequence."""
        return sum(map(len, self.before))

    def until(self, length: int) -> tuple[range, ...]:
        """The runs of rows of the sequence's first `length` tokens."""
        runs, left = [], length
        for run in (*self.before, self.rows):
            if left:
                runs.append(run[:left])
                left -= len(runs[-1])
        return tuple(runs)


@dataclass
class Pack:
    """Sequences in one row of tokens.

    Attributes:
        tokens: the tokens of the rows.
        segments: the segments, which cover the rows in order.
        paths: number of a sequence -> the runs of rows of all its tokens.
    """

    tokens: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    paths: dict[int, tuple[range, ...]] = field(default_factory=dict)

    def add(self, number: int, sequence: Ids, shared: int) -> None:
        """Add a sequence whose first `shared` tokens are those of the one before it."""
        path = self.segments[-1].until(shared) if shared else ()
        if shared < len(sequence):
            first = len(self.tokens)
            self.tokens += sequence[shared:]
            self.segments.append(Segment(range(first, len(self.tokens)), path))
            path = self.segments[-1].until(len(sequence))
        self.paths[number] = path

    def last_rows(self, number: int, count: int) -> list[int]:
        """The rows of the last `count` tokens of a sequence."""
        rows: list[int] = []
        for run in reversed(self.paths[number]):
            rows = [*run[max(0, len(run) - count + len(rows)) :], *rows]
            if len(rows) == count:
                break
        return rows

    @property
    def positions(self) -> list[int]:
        """The position of each row in its sequence."""
        return [place for s in self.segments for place in range(s.start, s.start + len(s.rows))]


def pack(sequences: Sequence[Ids], most: int) -> list[Pack]:
    """Pack sequences, each of at least one token, into rows of at most `most` tokens; the longest row first.

    A longer sequence has a row of its own.

    Args:
        sequences: the sequences; a pack numbers them by their places.
        most: the most tokens of a row.
    """
    packs: list[Pack] = []
    before: Ids = ()
    for number in sorted(range(len(sequences)), key=lambda number: tuple(sequences[number])):
        sequence = sequences[number]
        shared = _shared(before, sequence)
        if not packs or len(packs[-1].tokens) + len(sequence) - shared > most:
            packs.append(Pack())
            shared = 0
        packs[-1].add(number, sequence, shared)
        # A sequence within the one before adds no segment, and the next continues that one's.
        before = sequence if shared < len(sequence) else before
    return sorted(packs, key=lambda pack: len(pack.tokens), reverse=True)


def _shared(first: Ids, second: Ids) -> int:
    """The number of equal tokens at the beginning."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


@dataclass(frozen=True)
class TreeCore(AttentionCore):
    """Attention within the sequences of a pack, which is the only row of its batch.

    Attributes:
        segments: those of the pack.
        core: computes the attention of each of them.
    """

    segments: Sequence[Segment]
    core: AttentionCore

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
        assert inputs.wanted is None, "all rows of a pack are computed"

        def context(segment: Segment) -> Tensor:
            rows, places = segment.rows, range(segment.start, segment.start + len(segment.rows))
            keys = attends.keys_and_values(*(_joined(x, (*segment.before, rows)) for x in (k, v)))
            own = replace(inputs, rows=replace(inputs.rows, positions=places, documents=None))
            return self.core(q[rows.start : rows.stop], *keys, own, attends, bias, offset)

        return torch.cat([context(segment) for segment in self.segments])


def _joined(x: Tensor, runs: Iterable[range]) -> Tensor:
    parts = [x[run.start : run.stop] for run in _merged(runs)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _merged(runs: Iterable[range]) -> Iterator[range]:
    """Yield the runs, with those that follow each other as one."""
    last: range | None = None
    for run in runs:
        if last is not None and last.stop == run.start:
            last = range(last.start, run.stop)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last
