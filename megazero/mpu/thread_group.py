"""Ranks as threads of one process, for tests and small experiments: no launcher, no sockets.

Collectives are deterministic (members are reduced in rank order) and strict: if members call different
operations, or pass different shapes or dtypes, the error on every rank lists each member's call, and if a
member never arrives, the others stop waiting after a timeout.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megazero.errors import CommunicationError
from megazero.mpu.grid import Ranks, as_ranks
from megazero.mpu.group import DONE, Group, Reduction, Transfer, Work
from megazero.mpu.thread_turns import RankThread, Ticket, Turns

_Result = TypeVar("_Result")


class _Round:
    """One call of all members of a group: the input and the result of each."""

    def __init__(self, size: int):
        self.calls: list[str] = [""] * size
        self.brought: list[object] = [None] * size
        self.arrived = 0
        self.waiting: list[Ticket] = []
        self.results: Sequence[object] | None = None
        self.difference: list[str] | None = None
        self.error: Exception | None = None

    def settle(self, combine: Callable[[list[object]], Sequence[object]]) -> None:
        """Compute everyone's result while the other members sleep, so that nobody changes the inputs."""
        if any(call != self.calls[0] for call in self.calls):
            self.difference = self.calls
            return
        try:
            self.results = combine(self.brought)
        except Exception as error:  # raised by every member
            self.error = error


class ThreadMeeting:
    """The state that the threads of one group share: the round that they gather for, and mailboxes.

    All members meet once for each call. The last one to arrive computes everyone's result, while the others
    sleep and so leave their inputs unchanged.
    """

    def __init__(self, ranks: Ranks, timeout: float):
        self.ranks = ranks
        self.timeout = timeout
        self.lock = threading.Lock()
        self.round = _Round(len(ranks))
        self.mail: dict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)
        self.receivers: dict[tuple[int, int, int], deque[Ticket]] = defaultdict(deque)
        self.broken = False

    def abort(self) -> None:
        """Wake everyone who is waiting here; their calls fail."""
        with self.lock:
            self.broken = True
            tickets = [*self.round.waiting, *(t for waiting in self.receivers.values() for t in waiting)]
        for ticket in tickets:
            ticket.call()

    def gather(
        self, rank: int, call: str, brought: object, combine: Callable[[list[object]], Sequence[object]]
    ) -> _Round | None:
        """Join this round as member `rank`; returns it once all have joined, or None if they did not.

        Every member brings something and says how the results follow from what all have brought.
        """
        with self.lock:
            if self.broken:
                return None
            here = self.round
            here.calls[rank], here.brought[rank] = call, brought
            here.arrived += 1
            last = here.arrived == len(self.ranks)
            if last:
                self.round = _Round(len(self.ranks))
            else:
                ticket = Ticket()
                here.waiting.append(ticket)
        if not last:
            if not ticket.wait(self.timeout):
                self.abort()
            settled = here.results is not None or here.difference is not None or here.error is not None
            return here if settled else None
        here.settle(combine)
        for ticket in here.waiting:
            ticket.call()
        return here

    def post(self, box: tuple[int, int, int], message: Tensor) -> None:
        """Leave a message in a box, which is (from, to, tag)."""
        with self.lock:
            self.mail[box].append(message)
            receiver = self.receivers[box].popleft() if self.receivers[box] else None
        if receiver is not None:
            receiver.call()

    def receive(self, box: tuple[int, int, int]) -> Tensor | None:
        """The next message in a box; None if there is none after the timeout, or this meeting was aborted."""
        end = time.monotonic() + self.timeout
        while True:
            with self.lock:
                if self.mail[box]:
                    return self.mail[box].popleft()
                left = end - time.monotonic()
                if self.broken or left <= 0:
                    return None
                ticket = Ticket()
                self.receivers[box].append(ticket)
            if not ticket.wait(left):
                with self.lock:
                    if ticket in self.receivers[box]:
                        self.receivers[box].remove(ticket)


class ThreadWorld:
    """All meetings of one world of threads.

    Args:
        size: number of ranks.
        timeout: how many seconds a rank waits for the others in one call.
    """

    def __init__(self, size: int, timeout: float = 60.0):
        self.size = size
        self.timeout = timeout
        self._meetings: dict[tuple[str, Ranks], ThreadMeeting] = {}
        self._lock = threading.Lock()

    def meeting(self, name: str, ranks: Ranks) -> ThreadMeeting:
        with self._lock:
            return self._meetings.setdefault((name, ranks), ThreadMeeting(ranks, self.timeout))

    def group(self, name: str, rank: int, ranks: Ranks) -> ThreadGroup:
        ranks = as_ranks(ranks)
        return ThreadGroup(name, ranks.index(rank), self.meeting(name, ranks))

    def abort(self) -> None:
        with self._lock:
            for meeting in self._meetings.values():
                meeting.abort()

    def run(self, work: Callable[[int], _Result]) -> list[_Result]:
        """Call ``work(rank)`` on one thread per rank and return the results in rank order.

        The earliest failure ends the other ranks and is raised here.
        """
        results: list[Any] = [None] * self.size
        failures: list[tuple[int, BaseException]] = []
        core = this_core()

        def body(rank: int) -> None:
            # Ranks take turns, and passing a turn between cores costs more than it takes to use it.
            if core is not None:
                os.sched_setaffinity(0, {core})
            try:
                results[rank] = work(rank)
            except BaseException as error:  # handed to the caller below
                failures.append((rank, error))
                self.abort()

        turns = Turns()
        threads = [RankThread(turns, target=body, args=(r,), name=f"rank {r}") for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            rank, error = failures[0]
            error.add_note(f"on rank {rank} of {self.size}") if hasattr(error, "add_note") else None
            raise error
        return results


class ThreadGroup(Group):
    """One thread's end of a `ThreadMeeting`."""

    def __init__(self, name: str, rank: int, meeting: ThreadMeeting):
        self.name = name
        self.rank = rank
        self.ranks = meeting.ranks
        self._meeting = meeting

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False) -> Work:
        tensor.copy_(self._meet(f"all_reduce({op})", tensor, lambda all_: self._alike(_reduce(all_, op))))
        return DONE

    def all_gather(self, output: Tensor, tensor: Tensor, *, async_op: bool = False) -> Work:
        def joined(all_: list[Tensor]) -> Sequence[Tensor]:
            return self._alike(torch.cat([t.flatten() for t in all_]))

        output.copy_(self._meet("all_gather", tensor, joined).view(output.shape))
        return DONE

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False
    ) -> Work:
        def rows(all_: list[Tensor]) -> Sequence[Tensor]:
            return _reduce([t.reshape(self.size, -1) for t in all_], op).unbind()

        output.copy_(self._meet(f"reduce_scatter({op})", tensor, rows).view(output.shape))
        return DONE

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Work:
        even = tensor.shape[0] // self.size
        sizes = list(input_splits) if input_splits is not None else [even] * self.size

        def dealt(all_: list[tuple[Tensor, ...]]) -> Sequence[Tensor]:
            return [torch.cat([pieces[rank] for pieces in all_]) for rank in range(self.size)]

        pieces = tensor.detach().split(sizes)
        received = self._meet("all_to_all", pieces, dealt, signature=str(tensor.dtype))
        if received.shape != output.shape:
            raise CommunicationError(
                f"`all_to_all` over group `{self.name}` brought {tuple(received.shape)} to rank "
                f"{self.rank}, but its output has {tuple(output.shape)}"
            )
        output.copy_(received)
        return DONE

    def broadcast(self, tensor: Tensor, source: int, *, async_op: bool = False) -> Work:
        def value(all_: list[Tensor]) -> Sequence[Tensor]:
            return self._alike(all_[source].clone())

        tensor.copy_(self._meet(f"broadcast(from {source})", tensor, value))
        return DONE

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        for t in transfers:
            if t.kind == "send":
                self._meeting.post((self.rank, t.peer, t.tag), t.tensor.detach().clone())
        return [DONE if t.kind == "send" else _Receipt(self, t) for t in transfers]

    def barrier(self) -> None:
        self._meet("barrier", None, lambda all_: all_)

    def _alike(self, result: Tensor) -> Sequence[Tensor]:
        """The same result for every member, which all of them copy from and none changes."""
        return [result] * self.size

    def _meet(
        self, call: str, mine: Any, combine: Callable[[list[Any]], Sequence[Any]], signature: str = ""
    ) -> Any:
        """Contribute `mine`; return this member's part of `combine` of all contributions, in rank order."""
        if isinstance(mine, Tensor):
            mine = mine.detach()
            signature = f"{tuple(mine.shape)} {mine.dtype}"
        settled = self._meeting.gather(self.rank, f"{call} {signature}".strip(), mine, combine)
        if settled is None:
            raise CommunicationError(
                f"`{call}` over group `{self.name}` on rank {self.ranks[self.rank]}: another member failed "
                f"or did not arrive within {self._meeting.timeout} s"
            )
        if settled.difference is not None:
            listing = "; ".join(f"rank {r}: {c}" for r, c in zip(self.ranks, settled.difference, strict=True))
            raise CommunicationError(f"the members of group `{self.name}` made different calls: {listing}")
        if settled.error is not None:
            raise CommunicationError(
                f"`{call}` over group `{self.name}` on rank {self.ranks[self.rank]}: {settled.error}"
            ) from settled.error
        assert settled.results is not None, "a round that is over has results, a difference or an error"
        return settled.results[self.rank]


class _Receipt(Work):
    """A receive in progress; `wait` blocks until its message has arrived."""

    def __init__(self, group: ThreadGroup, transfer: Transfer):
        self.group = group
        self.transfer = transfer
        self.come = False

    def wait(self) -> None:
        if self.come:
            return
        group, t = self.group, self.transfer
        message = group._meeting.receive((t.peer, group.rank, t.tag))
        if message is None:
            meeting = group._meeting
            why = "another member failed" if meeting.broken else f"nothing came within {meeting.timeout} s"
            raise CommunicationError(
                f"receive from rank {t.peer} (tag {t.tag}) over group `{group.name}` on rank "
                f"{group.rank}: {why}"
            )
        if message.shape != t.tensor.shape or message.dtype != t.tensor.dtype:
            raise CommunicationError(
                f"receive from rank {t.peer} (tag {t.tag}) over group `{group.name}`: expected "
                f"{tuple(t.tensor.shape)} {t.tensor.dtype}, got {tuple(message.shape)} {message.dtype}"
            )
        t.tensor.copy_(message)
        self.come = True


def this_core() -> int | None:
    """The core that this thread runs on, or None if that is unknown or threads cannot be pinned to a core."""
    stat = Path("/proc/thread-self/stat")
    if not hasattr(os, "sched_setaffinity") or not stat.exists():
        return None
    return int(stat.read_text().rpartition(")")[2].split()[36])


def _reduce(tensors: list[Tensor], op: Reduction) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        if op == "sum":
            total += tensor
        elif op == "max":
            torch.maximum(total, tensor, out=total)
        else:
            torch.minimum(total, tensor, out=total)
    return total
