"""`Plan`: what rank 0 tells the others of a step, and how it gets there: numbers in one small message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megazero.mpu.group import Group
from megazero.mpu.messages import broadcast_value

_AT_ONCE = 1024
"""Numbers of the first message of a step; the rest follows in a second one, if there is any."""


class Reads(NamedTuple):
    """The results that are read of a part's rows.

    Attributes:
        draws: 1 if a token is drawn after the last row, else 0.
        scored: how many rows, from the first, are scored by the tokens that follow them.
        best: how many of the likeliest tokens a score lists.
    """

    draws: int
    scored: int
    best: int


class Part(NamedTuple):
    """The share of one sequence in a step.

    Attributes:
        ticket: the sequence; a rank that has none of this number makes a new table or cache.
        past: its tokens that are computed already.
        rows: how many of its next tokens are computed.
        room: the most tokens that it can come to.
        reads: what is read of the rows.
        tokens: the rows' tokens, and the one after them if the last row is scored.
        pages: the pages that its table gains.
    """

    ticket: int
    past: int
    rows: int
    room: int
    reads: Reads
    tokens: list[int]
    pages: list[int]


@dataclass(frozen=True)
class Plan:
    """One step.

    Attributes:
        parts: what to compute.
        dropped: the sequences whose tables and caches to forget before.
        last: whether no step follows.
    """

    parts: Sequence[Part] = ()
    dropped: Sequence[int] = ()
    last: bool = False

    def numbers(self) -> list[int]:
        """The plan as numbers."""
        numbers = [len(self.parts), len(self.dropped), int(self.last), *self.dropped]
        for ticket, past, rows, room, reads, tokens, pages in self.parts:
            numbers += (ticket, past, rows, room, *reads, len(tokens), len(pages), *tokens, *pages)
        return numbers

    @classmethod
    def of_numbers(cls, numbers: list[int]) -> Plan:
        """The plan that `numbers` came from."""
        parts, dropped, last = numbers[:3]
        at, read = 3 + dropped, []
        for _ in range(parts):
            ticket, past, rows, room, draws, scored, best, tokens, pages = numbers[at : at + _FIXED]
            middle = at + _FIXED + tokens
            ids, added = numbers[at + _FIXED : middle], numbers[middle : middle + pages]
            read.append(Part(ticket, past, rows, room, Reads(draws, scored, best), ids, added))
            at = middle + pages
        return cls(read, numbers[3 : 3 + dropped], bool(last))


_FIXED = 9  # numbers of a part before its tokens


class Relay:
    """Brings plans from the leading rank to all ranks of a model.

    Args:
        groups: groups that, one after another, reach every rank from the first of each: the message goes
            along the first group, from all its members along the second, and so on.
        device: where messages lie.
    """

    def __init__(self, groups: Sequence[Group], device: torch.device):
        self.groups = [group for group in groups if group.size > 1]
        self.device = device
        self.leads = all(group.rank == 0 for group in self.groups)

    def share(self, plan: Plan) -> Plan:
        """The leading rank's plan, on every rank."""
        if not self.groups:
            return plan
        own = plan.numbers() if self.leads else []
        length, *numbers = self._sent([len(own), *own[: _AT_ONCE - 1]], _AT_ONCE)
        if length > len(numbers):
            numbers += self._sent(own[len(numbers) :], length - len(numbers))
        return Plan.of_numbers(numbers)

    def value(self, value: Any) -> Any:
        """The leading rank's value, which JSON must be able to hold, on every rank."""
        for group in self.groups:
            value = broadcast_value(group, value, self.device)
        return value

    def meet(self) -> None:
        """Return when every rank has called it."""
        for group in self.groups:
            group.barrier()

    def _sent(self, numbers: list[int], length: int) -> list[int]:
        """The leading rank's numbers, `length` of them."""
        message = [*numbers, *[0] * (length - len(numbers))]
        tensor = torch.tensor(message, dtype=torch.int32, device=self.device)
        for group in self.groups:
            group.broadcast(tensor, 0).wait()
        received: list[int] = tensor.tolist()
        return received
