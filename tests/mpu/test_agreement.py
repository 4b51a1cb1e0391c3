"""Whether ranks mean the same: what a message says, over a group and by notes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megazero.errors import CommunicationError, ConfigError
from megazero.mpu import tree
from megazero.mpu.agreement import agree, agree_by_notes, disagreements
from megazero.mpu.messages import name_ranks
from megazero.mpu.thread_group import ThreadWorld
from tests.mpu.test_watch import Notes
from tests.tables import over_table

FACTS = {"lr": "0.1", "seed": "1"}


def test_a_message_has_values_and_ranks_the_most_common_first():
    facts = dict.fromkeys(range(9), FACTS) | {3: {**FACTS, "lr": "0.2"}, 4: {"lr": "0.3", "tp": "2"}}
    assert disagreements(facts) == [
        "`lr` must be the same on all ranks, but is 0.1 on ranks 0-2, 5-8, 0.2 on rank 3, 0.3 on rank 4.",
        "`seed` must be the same on all ranks, but is 1 on ranks 0-3, 5-8, not known on rank 4.",
        "`tp` must be the same on all ranks, but is not known on ranks 0-3, 5-8, 2 on rank 4.",
    ]
    many = {rank: {"seed": str(rank) * 100} for rank in range(5)}
    assert disagreements(many) == [
        f"`seed` must be the same on all ranks, but is {'0' * 60}... on rank 0, {'1' * 60}... on rank 1, "
        f"{'2' * 60}... on rank 2 and 2 other values elsewhere."
    ]
    assert disagreements({0: FACTS, 1: dict(reversed(FACTS.items()))}) == []


def over_a_group(facts: list[dict[str, str]]) -> list[Exception | None]:
    world, members = ThreadWorld(len(facts), timeout=20), tuple(range(len(facts)))

    def rank(number: int) -> Exception | None:
        try:
            agree(world.group("world", number, members), lambda: facts[number], torch.device("cpu"))
        except ConfigError as error:
            return error

    return world.run(rank)


def by_notes(facts: list[dict[str, str]]) -> list[Exception | None]:
    job_notes = Notes()

    def rank(number: int) -> Exception | None:
        try:
            agree_by_notes(job_notes, number, len(facts), facts[number], 20.0)
        except ConfigError as error:
            return error

    with ThreadPoolExecutor(len(facts)) as threads:
        return list(threads.map(rank, range(len(facts))))


@pytest.mark.parametrize("way", [over_a_group, by_notes])
def test_ranks_that_agree_go_on(way):
    assert way([FACTS, dict(reversed(FACTS.items())), FACTS]) == [None] * 3


@over_table("odd", [0, 1, 2])
@over_table("way", [over_a_group, by_notes])
def test_every_rank_hears_who_differs_in_what(way, odd):
    facts = [dict(FACTS) for _ in range(3)]
    facts[odd] = {"lr": "0.5", "seed": "2"}
    others = (
        ", ".join(str(rank) for rank in range(3) if rank != odd).replace("0, 1", "0-1").replace("1, 2", "1-2")
    )
    for error in way(facts):
        assert error.exit_code == 2
        assert error.violations == [
            f"`lr` must be the same on all ranks, but is 0.1 on ranks {others}, 0.5 on rank {odd}.",
            f"`seed` must be the same on all ranks, but is 1 on ranks {others}, 2 on rank {odd}.",
        ]


@pytest.mark.parametrize("way", [over_a_group, by_notes])
def test_what_another_rank_answers_for_is_not_compared(way):
    """Two machines of two ranks; on each, the first rank alone looks at the code."""

    def machines(*code: str) -> list[dict[str, str | None]]:
        return [{**FACTS, "code": value} for first in code for value in (first, None)]

    assert way(machines("a", "a")) == [None] * 4
    for error in way(machines("a", "b")):
        assert error.violations == ["`code` must be the same on all ranks, but is a on rank 0, b on rank 2."]
    facts = machines("a", "a")
    facts[3]["lr"] = "0.5"  # what it does answer for counts
    for error in way(facts):
        assert error.violations == [
            "`lr` must be the same on all ranks, but is 0.1 on ranks 0-2, 0.5 on rank 3."
        ]


def test_the_first_rank_stays_until_all_have_heard():
    """Its process may keep the notes, and the others would find it gone."""
    job_notes = Notes()

    class Late(Notes):
        def read(self, key: str) -> str | None:
            time.sleep(0.2 if key.endswith("found") else 0.0)
            return job_notes.read(key)

        def post(self, key: str, text: str) -> None:
            job_notes.post(key, text)

    def rank(number: int) -> bool:
        with pytest.raises(ConfigError):
            agree_by_notes(Late() if number else job_notes, number, 2, {"seed": str(number)}, 20.0)
        return "agreement/heard/1" in job_notes.texts

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(rank, range(2))) == [True, True]


def test_a_rank_that_says_nothing_is_named():
    with pytest.raises(CommunicationError, match="rank 1 must say what it is configured for.*for 0.05 s"):
        agree_by_notes(Notes(), 0, 2, FACTS, 0.05)
    with pytest.raises(CommunicationError, match="rank 0 must say"):
        agree_by_notes(Notes(), 1, 2, FACTS, 0.05)


@over_table("odd", [None, 0, 1, 9])
def test_digests_go_up_a_tree(monkeypatch, odd):
    """Of ten ranks each hears from two; what differs is said as if the first had heard from all."""
    monkeypatch.setattr(tree, "FAN", 2)
    facts = [{**FACTS, "lr": "0.5"} if rank == odd else FACTS for rank in range(10)]
    errors = by_notes(facts)
    if odd is None:
        assert errors == [None] * 10
        return
    others = name_ranks([rank for rank in range(10) if rank != odd])
    assert {error.violations[0] for error in errors} == {
        f"`lr` must be the same on all ranks, but is 0.1 on {others}, 0.5 on rank {odd}."
    }


def test_ranks_that_all_differ_are_all_named():
    facts = [{"seed": str(rank)} for rank in range(20)]
    (said,) = {error.violations[0] for error in by_notes(facts)}
    assert said == (
        "`seed` must be the same on all ranks, but is 0 on rank 0, 1 on rank 1, 2 on rank 2 and 17 other "
        "values elsewhere."
    )


class CountedNotes(Notes):
    """Notes that count how often they are asked."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.posts = 0

    def read(self, key: str) -> str | None:
        self.reads += 1
        if key.startswith("agreement/digest/"):
            return self.texts["digest"]
        return self.texts.get(key, "same" if key == "agreement/verdict" else None)

    def post(self, key: str, text: str) -> None:
        self.posts += 1
        self.texts["digest" if "digest" in key else key] = text


@pytest.mark.parametrize("size", [1024, 16384])
def test_a_rank_reads_no_more_notes_of_a_larger_job(size):
    job_notes = CountedNotes()
    for rank, reads in ((size - 1, 1), (1, 65), (0, 65)):
        job_notes.reads = job_notes.posts = 0
        agree_by_notes(job_notes, rank, size, FACTS, 1.0)
        assert (job_notes.reads, job_notes.posts) == (reads, 1), rank
