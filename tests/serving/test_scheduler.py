"""The laws of a step, with tokens that nobody computes."""

from __future__ import annotations

import random

import pytest

from megazero.serving.pages import PagePool
from megazero.serving.scheduler import Scheduler, Sequence
from megazero.serving.wanted import Wanted

PAGE = 4


def scheduler_of(pages: int, tokens: int = 8, running: int = 4, *, reuse: bool = True) -> Scheduler:
    return Scheduler(PagePool(pages, PAGE), tokens=tokens, most=running, reuse=reuse)


class Play:
    """Runs a scheduler; a drawn token is a random one of two."""

    def __init__(self, scheduler: Scheduler, seed: int = 0):
        self.scheduler, self.rng = scheduler, random.Random(seed)
        self.made = 0
        self.ended: list[int] = []
        self.steps: list[list[tuple[int, int]]] = []

    def add(self, prompt: list[int], new: int, **settings) -> Sequence:
        sequence = Sequence(self.made, Wanted(tuple(prompt), new, **settings), lambda event: None)
        self.made += 1
        self.scheduler.waiting.append(sequence)
        return sequence

    def step(self) -> list[tuple[int, int]]:
        """One step: (ticket, tokens) of its pieces, after which the laws hold."""
        scheduler = self.scheduler
        oldest = next(scheduler.sequences(), None)
        pieces = scheduler.plan()
        scheduler.check()
        scheduler.dropped.clear()
        counts = [(piece.sequence.ticket, piece.count) for piece in pieces]
        assert sum(count for _, count in counts) <= scheduler.tokens
        assert len(pieces) <= scheduler.most
        assert len({ticket for ticket, _ in counts}) == len(counts)
        assert all(count > 0 for _, count in counts)
        assert oldest is None or oldest.ticket in dict(counts), "the oldest always gets on"
        writes = [
            piece.sequence.table.pages[at // PAGE]
            for piece in pieces
            for at in range(piece.sequence.computed, piece.sequence.computed + piece.count)
        ]
        shared = [page for page in set(writes) if scheduler.pool._holders[page] > 1]
        assert shared == [], "nobody writes into a page of others"
        scheduler.advance(pieces)
        for piece in pieces:
            sequence = piece.sequence
            if sequence.left == 0:
                sequence.tokens.append(self.rng.randrange(2))
                if len(sequence.tokens) >= len(sequence.wanted.prompt) + sequence.wanted.max_tokens:
                    scheduler.end(sequence)
                    self.ended.append(sequence.ticket)
        scheduler.check()
        self.steps.append(counts)
        return counts

    def drain(self) -> None:
        for _ in range(5000):
            if not any(True for _ in self.scheduler.sequences()):
                return
            self.step()
        raise AssertionError("something waits for ever")


def test_decodes_come_first_and_prompts_fill_the_budget():
    play = Play(scheduler_of(64))
    play.add([0] * 3, 5)
    assert play.step() == [(0, 3)]
    play.add([1] * 12, 1)
    play.add([2, 3], 2)
    assert play.step() == [(0, 1), (1, 7)]
    assert play.step() == [(0, 1), (1, 5), (2, 2)]
    assert play.step() == [(0, 1), (2, 1)]


def test_the_youngest_gives_up_its_pages_and_begins_again_first():
    play = Play(scheduler_of(4))
    play.add([0, 1, 0, 1, 0, 1, 1], 9)
    young = play.add([1, 0, 0], 5)
    play.add([1, 1], 1)
    play.step()
    while not play.scheduler.preemptions:
        play.step()
    assert play.scheduler.waiting[0] is young
    assert len(young.tokens) > 3  # what it has drawn stays
    play.drain()
    assert play.ended.index(0) < play.ended.index(1)
    assert play.scheduler.pool.free == 4


def test_prompts_in_common_are_computed_once():
    """As with n > 1: the others wait until the first has computed what they share."""
    play, prompt = Play(scheduler_of(64, tokens=16)), [5, 6, 7, 8] * 3 + [9]
    for _ in range(3):
        play.add(prompt, 2)
    assert play.step() == [(0, 13)]
    assert play.step() == [(0, 1), (1, 1), (2, 1)]
    assert play.scheduler.cached_tokens == 24


def test_a_scored_prompt_is_computed_whole():
    play, prompt = Play(scheduler_of(64, tokens=16)), [5, 6, 7, 8] * 2 + [9]
    play.add(prompt, 1)
    play.step()
    play.add(prompt, 1, prompt_logprobs=0)
    assert play.step() == [(1, 9)]


def test_without_reuse_nothing_is_shared():
    play, prompt = Play(scheduler_of(64, tokens=16, reuse=False)), [5, 6, 7, 8] * 2 + [9]
    play.add(prompt, 1)
    play.step()
    play.add(prompt, 1)
    assert play.step() == [(1, 9)]


@pytest.mark.parametrize("reuse", [True, False])
def test_any_history_keeps_the_laws_and_ends(reuse):
    """Few pages, random arrivals and departures; at the end nothing is held and nobody waits."""
    preemptions = 0
    for seed in range(8):
        rng = random.Random(seed)
        pages, running = rng.randint(5, 9), rng.randint(2, 5)
        play = Play(scheduler_of(pages, rng.randint(running, 9), running, reuse=reuse), seed)
        for _ in range(120):
            if rng.random() < 0.5:
                prompt = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
                play.add(prompt, rng.randint(1, 8), prompt_logprobs=rng.choice([None, None, 1]))
            if rng.random() < 0.2 and (alive := list(play.scheduler.sequences())):
                play.scheduler.end(rng.choice(alive))
                play.scheduler.check()
            play.step()
        play.drain()
        assert play.scheduler.pool.free == pages
        preemptions += play.scheduler.preemptions
    assert preemptions > 10
