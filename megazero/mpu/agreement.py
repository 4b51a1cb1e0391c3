"""Checks that all ranks of a job agree on facts (layout, backend, versions) before any of these matters.

`agree` compares over a group. `agree_by_notes` does so by notes that the processes leave for each other,
before there are groups: ranks that want different layouts, backends or devices could not even open them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch

from megazero.errors import CommunicationError, ConfigError
from megazero.mpu.group import Group
from megazero.mpu.messages import broadcast_value, gather_values, name_ranks, same_on_all
from megazero.mpu.tree import children, pause_of
from megazero.mpu.watch.job_notes import JobNotes

Facts = Mapping[str, str | None]
"""What a rank holds to be true, by the name that a message uses; None where another rank answers for it."""

_SHOWN = 3  # values of a fact in a message
_LONGEST = 60  # characters of a value in a message
_FAREWELL = 10.0  # seconds
_SAME, _DIFFERENT = "same", "different"
_SORTS = 16  # of notes, more than there are where ranks mean the same
_MOST_READS = 10_000  # of a note that is not there yet, by all ranks in a second


def agree(group: Group, gather: Callable[[], Facts], device: torch.device) -> None:
    """Compare the facts that `gather` returns on each member; every member calls this.

    Raises:
        ConfigError: on every member: names each fact that differs, with its values and the ranks.
    """
    if group.size == 1:
        return
    facts = gather()
    digest = _digest(facts)
    if same_on_all(group, bytes.fromhex(digest), device):
        return
    digests = gather_values(group, digest, device)
    meant = {
        said: broadcast_value(group, dict(facts), device, digests.index(said))
        for said in dict.fromkeys(digests)
    }
    if violations := disagreements({r: meant[said] for r, said in zip(group.ranks, digests, strict=True)}):
        raise ConfigError(violations)


def agree_by_notes(job_notes: JobNotes, rank: int, world_size: int, facts: Facts, patience: float) -> None:
    """Compare the facts of all ranks of a job; every rank calls this.

    Digests go up the tree of ranks: a rank passes on the distinct digests of the ranks below it. The first
    rank leaves the result for all, so a rank reads one note for each of its children and one more. The facts
    themselves are exchanged only where digests differ, from one rank for each digest.

    Args:
        job_notes: where the ranks leave notes for each other.
        facts: this rank's facts by name.
        patience: seconds to wait for a note.

    Raises:
        ConfigError: on every rank: names each fact that differs, with its values and the ranks.
        CommunicationError: a rank left no note in time.
    """
    pause = pause_of(0.1, world_size, _MOST_READS)

    def read(name: str, author: int, patience: float = patience) -> str:
        return _read(job_notes, name, author, patience, pause)

    below = {
        note for child in children(rank, world_size) for note in json.loads(read(f"digest/{child}", child))
    }
    own = _note(facts, leaving_out=sorted(name for name, value in facts.items() if value is None))
    if rank == 0:
        alike = all(_note(facts, leaving_out=json.loads(note)["not said"]) == note for note in below)
        job_notes.post(_key("verdict"), _SAME if alike and len(below) < _SORTS else _DIFFERENT)
    else:
        job_notes.post(_key(f"digest/{rank}"), json.dumps(sorted({own, *below})[:_SORTS]))
    if read("verdict", 0) == _SAME:
        return
    if rank == 0:
        _explain(job_notes, read, own, facts, world_size)
    else:
        job_notes.post(_key(f"own/{rank}"), own)
        if rank in json.loads(read("wanted", 0)):
            job_notes.post(_key(f"facts/{rank}"), json.dumps(dict(facts)))
    sentences = json.loads(read("found", 0))
    if rank == 0:  # whose process may keep the notes; a rank that has gone must not hide what was found
        with suppress(CommunicationError):
            for other in range(1, world_size):
                read(f"heard/{other}", other, min(patience, _FAREWELL))
    else:
        job_notes.post(_key(f"heard/{rank}"), "")
    raise ConfigError(sentences)


def _explain(
    job_notes: JobNotes, read: Callable[[str, int], str], own: str, facts: Facts, world_size: int
) -> None:
    """Ask one rank for each digest for its facts, and leave the sentences about what differs."""
    holders = {own: [0]}
    for other in range(1, world_size):
        holders.setdefault(read(f"own/{other}", other), []).append(other)
    asked = [ranks[0] for ranks in holders.values() if ranks[0]]
    job_notes.post(_key("wanted"), json.dumps(asked))
    meant = {0: facts, **{rank: json.loads(read(f"facts/{rank}", rank)) for rank in asked}}
    everyone = {rank: meant[ranks[0]] for ranks in holders.values() for rank in ranks}
    job_notes.post(_key("found"), json.dumps(disagreements(dict(sorted(everyone.items())))))


def disagreements(facts: Mapping[int, Facts]) -> list[str]:
    """A sentence for each fact that differs, from those of each rank; the value of most ranks comes first."""
    names = list(dict.fromkeys(name for of_rank in facts.values() for name in of_rank))
    sentences = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, of_rank in facts.items():
            value = of_rank.get(name, "not known")
            if value is not None:
                holders.setdefault(value, []).append(rank)
        if len(holders) > 1:
            order = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
            values = [f"{_short(value)} on {name_ranks(ranks)}" for value, ranks in order[:_SHOWN]]
            more = len(order) - _SHOWN
            rest = f" and {more} other values elsewhere" if more > 0 else ""
            sentences.append(f"`{name}` must be the same on all ranks, but is {', '.join(values)}{rest}.")
    return sentences


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."


def _note(facts: Facts, leaving_out: Sequence[str]) -> str:
    """A digest of the facts but for some, which the note names."""
    said = {name: value for name, value in facts.items() if name not in leaving_out}
    return json.dumps({"not said": leaving_out, "digest": _digest(said)})


def _digest(facts: Facts) -> str:
    return hashlib.blake2b(json.dumps(sorted(facts.items())).encode(), digest_size=16).hexdigest()


def _key(name: str) -> str:
    return f"agreement/{name}"


def _read(job_notes: JobNotes, name: str, author: int, patience: float, longest: float) -> str:
    """Wait for a note, looking for it after pauses of up to `longest` seconds, and return it."""
    pause, end = 0.001, time.monotonic() + patience
    while (text := job_notes.read(_key(name))) is None:
        if time.monotonic() > end:
            raise CommunicationError(
                f"rank {author} must say what it is configured for, but said nothing for {patience:g} s; "
                "look at its log"
            )
        time.sleep(pause)
        pause = min(longest, 2 * pause)
    return text
