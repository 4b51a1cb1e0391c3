"""Whether all ranks of a job mean the same: facts by name, compared before any of them matters.

`agree` compares over a group. `agree_by_notes` does so by notes that the processes leave for each other,
before there are groups: ranks that want different layouts, backends or devices could not even open them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch

from megazero.errors import CommunicationError, ConfigError
from megazero.mpu.group import Group
from megazero.mpu.messages import gather_values, name_ranks
from megazero.mpu.watch.job_notes import JobNotes

Facts = Mapping[str, str]
"""What a rank holds to be true, by the name that a message uses."""

_SHOWN = 3  # values of a fact in a message
_LONGEST = 60  # characters of a value in a message
_FAREWELL = 10.0  # seconds
_SAME, _DIFFERENT = "same", "different"


def agree(group: Group, gather: Callable[[], Facts], device: torch.device) -> None:
    """Compare the members' facts, which `gather` finds; every member calls this.

    Raises:
        ConfigError: on every member: names each fact that differs, with its values and the ranks.
    """
    if group.size == 1:
        return
    facts = gather()
    digests = gather_values(group, _digest(facts), device)
    if len(set(digests)) == 1:
        return
    everyone = gather_values(group, dict(facts), device)
    raise ConfigError(disagreements(dict(zip(group.ranks, everyone, strict=True))))


def agree_by_notes(job_notes: JobNotes, rank: int, world_size: int, facts: Facts, patience: float) -> None:
    """Compare the facts of all ranks of a job; every rank calls this.

    The first rank reads a digest of each and tells the others what it found, so a job of many ranks leaves
    two notes per rank. Only where they differ are the facts themselves exchanged.

    Args:
        job_notes: where the ranks leave notes for each other.
        patience: seconds to wait for a note.

    Raises:
        ConfigError: on every rank: names each fact that differs, with its values and the ranks.
        CommunicationError: a rank left no note in time.
    """
    if rank == 0:
        others = [_read(job_notes, f"digest/{other}", other, patience) for other in range(1, world_size)]
        job_notes.post(_key("verdict"), _SAME if {*others} <= {_digest(facts)} else _DIFFERENT)
    else:
        job_notes.post(_key(f"digest/{rank}"), _digest(facts))
    if _read(job_notes, "verdict", 0, patience) == _SAME:
        return
    job_notes.post(_key(f"facts/{rank}"), json.dumps(dict(facts)))
    if rank == 0:
        everyone = {r: json.loads(_read(job_notes, f"facts/{r}", r, patience)) for r in range(world_size)}
        job_notes.post(_key("found"), json.dumps(disagreements(everyone)))
    sentences = json.loads(_read(job_notes, "found", 0, patience))
    if rank == 0:  # whose process may keep the notes; a rank that has gone must not hide what was found
        with suppress(CommunicationError):
            for other in range(1, world_size):
                _read(job_notes, f"heard/{other}", other, min(patience, _FAREWELL))
    else:
        job_notes.post(_key(f"heard/{rank}"), "")
    raise ConfigError(sentences)


def disagreements(facts: Mapping[int, Facts]) -> list[str]:
    """A sentence for each fact that differs, from those of each rank; the value of most ranks comes first."""
    names = list(dict.fromkeys(name for of_rank in facts.values() for name in of_rank))
    sentences = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, of_rank in facts.items():
            holders.setdefault(of_rank.get(name, "not known"), []).append(rank)
        if len(holders) > 1:
            order = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
            values = [f"{_short(value)} on {name_ranks(ranks)}" for value, ranks in order[:_SHOWN]]
            more = len(order) - _SHOWN
            rest = f" and {more} other values elsewhere" if more > 0 else ""
            sentences.append(f"`{name}` must be the same on all ranks, but is {', '.join(values)}{rest}.")
    return sentences


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."


def _digest(facts: Facts) -> str:
    return hashlib.blake2b(json.dumps(sorted(facts.items())).encode(), digest_size=16).hexdigest()


def _key(name: str) -> str:
    return f"agreement/{name}"


def _read(job_notes: JobNotes, name: str, author: int, patience: float) -> str:
    """Wait for a note, and return it."""
    pause, end = 0.001, time.monotonic() + patience
    while (text := job_notes.read(_key(name))) is None:
        if time.monotonic() > end:
            raise CommunicationError(
                f"rank {author} must say what it is configured for, but said nothing for {patience:g} s; "
                "look at its log"
            )
        time.sleep(pause)
        pause = min(0.1, 2 * pause)
    return text
