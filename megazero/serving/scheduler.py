"""`Scheduler`: what each step computes, decided in pure Python from requests, pages and a budget of tokens.

Every running sequence that has its prompt behind it gets one token; pieces of prompts fill the rest of the
budget (Dynamic SplitFuse, DeepSpeed-FastGen, Holmes et al. 2024). Sequences run in the order of their
tickets. If the pages run out, the youngest gives up its own and begins again later, so the oldest always
gets on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from megazero.serving.pages import PagePool, PageTable
from megazero.serving.wanted import Listener, Token, Wanted


@dataclass(eq=False)
class Sequence:
    """A request on its way.

    Attributes:
        ticket: its number; smaller ones came earlier.
        wanted: the request.
        listener: whom to tell.
        tokens: its prompt and what was drawn.
        computed: how many of them, from the first, are in the pages.
        scores: the prompt's tokens that are scored; the first has no score.
        scored: whether they have been told.
        table: its pages.
    """

    ticket: int
    wanted: Wanted
    listener: Listener
    tokens: list[int] = field(init=False)
    computed: int = 0
    scores: list[Token | None] = field(default_factory=lambda: [None])
    scored: bool = False
    table: PageTable = field(init=False)

    def __post_init__(self) -> None:
        self.tokens, self.table = list(self.wanted.prompt), PageTable(self.wanted.salt)

    @property
    def left(self) -> int:
        """The number of tokens that are not computed: 1 if it only lacks the next one."""
        return len(self.tokens) - self.computed

    @property
    def scoring(self) -> bool:
        """Whether its prompt has yet to be scored."""
        return self.wanted.prompt_logprobs is not None and not self.scored


@dataclass(frozen=True)
class Piece:
    """The next `count` tokens of a sequence, with the pages that ranks do not know of yet."""

    sequence: Sequence
    count: int
    pages: list[int]


class Scheduler:
    """Decides what steps compute.

    Args:
        pool: the pages.
        tokens: the most tokens of a step.
        most: the most sequences of a step; at most `tokens`.
        reuse: whether sequences may share pages.
    """

    def __init__(self, pool: PagePool, *, tokens: int, most: int, reuse: bool):
        self.pool, self.tokens, self.most, self.reuse = pool, tokens, most, reuse
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.dropped: list[int] = []
        self.preemptions = 0
        self.cached_tokens = 0

    def plan(self) -> list[Piece]:
        """Decide on the next step's pieces; at least one if any sequence is there."""
        decoding = sum(sequence.left == 1 for sequence in self.running)
        budget, preempted = self.tokens - decoding, self.preemptions
        pieces = []
        for sequence in tuple(self.running):
            if preempted != self.preemptions and sequence not in self.running:
                break  # the youngest were preempted, so all after it were
            spent = sequence.left > 1
            piece = self._piece(sequence, budget if spent else 1)
            if piece is not None:
                pieces.append(piece)
                budget -= piece.count * spent
        while preempted == self.preemptions and (piece := self._admit(budget)) is not None:
            pieces.append(piece)
            budget -= piece.count
        return pieces

    def advance(self, pieces: list[Piece]) -> None:
        """Note that the pieces are computed, whereupon others may share their pages."""
        for piece in pieces:
            sequence = piece.sequence
            sequence.computed += piece.count
            if self.reuse:
                self.pool.publish(sequence.table, sequence.tokens, sequence.computed)

    def end(self, sequence: Sequence) -> None:
        """Let go of a sequence, wherever it is, and of its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._drop(sequence)
        else:
            self.waiting.remove(sequence)

    def sequences(self) -> Iterator[Sequence]:
        """All sequences, from the oldest."""
        yield from self.running
        yield from self.waiting

    def check(self) -> None:
        """Raise AssertionError unless pages, queue and order are sound."""
        self.pool.check(sequence.table for sequence in self.sequences())
        tickets = [sequence.ticket for sequence in self.sequences()]
        assert tickets == sorted(tickets), "a younger sequence is before an older one"
        assert not any(sequence.table.pages for sequence in self.waiting), "who waits holds pages"

    def _piece(self, sequence: Sequence, most: int) -> Piece | None:
        """The next piece of a running sequence; None if the budget is spent, or until older ones end."""
        count = min(sequence.left, most)
        while count > 0:
            # Rather less of a prompt than somebody else's pages.
            room = (len(sequence.table.pages) + self.pool.free) * self.pool.page - sequence.computed
            if room > 0:
                count = min(count, room)
                pages = self.pool.extend(sequence.table, sequence.computed + count)
                assert pages is not None, "there is room"
                return Piece(sequence, count, pages)
            youngest = self.running[-1]
            if youngest is sequence:
                return None
            self._preempt(youngest)
        return None

    def _admit(self, budget: int) -> Piece | None:
        """The first piece of the first that waits, which runs from now on; None if it cannot."""
        if not self.waiting or budget < 1 or len(self.running) >= self.most:
            return None
        sequence = self.waiting[0]
        reused = 0
        if self.reuse and not sequence.scoring:
            reused = self.pool.adopt(sequence.table, sequence.tokens)
            sequence.computed = reused
        if not self._may_run(sequence, budget):
            self._forget(sequence)
            return None
        self.cached_tokens += reused
        self.running.append(self.waiting.popleft())
        piece = self._piece(sequence, budget)
        assert piece is not None, "there is room and budget"
        return Piece(sequence, piece.count, list(sequence.table.pages))

    def _may_run(self, sequence: Sequence, budget: int) -> bool:
        """Whether pages suffice, with one more for each running one, and nobody computes its next page."""
        end = sequence.computed + min(sequence.left, budget)
        lacking = -(-end // self.pool.page) - len(sequence.table.pages)
        if self.running and self.pool.free < lacking + len(self.running):
            return False
        if not self.reuse or sequence.scoring:
            return True
        name = self.pool.name_after(sequence.table, sequence.tokens)
        # A page is of use only if it does not hold the last token.
        if name is None or (sequence.table.named + 1) * self.pool.page >= len(sequence.tokens):
            return True
        prefilling = (other for other in self.running if other.left > 1)
        return all(self.pool.name_after(other.table, other.tokens) != name for other in prefilling)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1
        self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        self._forget(sequence)
        self.dropped.append(sequence.ticket)

    def _forget(self, sequence: Sequence) -> None:
        self.pool.release(sequence.table)
        sequence.table, sequence.computed = PageTable(sequence.wanted.salt), 0
