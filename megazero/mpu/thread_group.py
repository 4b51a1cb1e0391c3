"""Ranks as threads of one process, for tests and small experiments: no launcher, no sockets.

Collectives are deterministic (members are reduced in rank order) and strict: if members call different
operations, or pass different shapes or dtypes, the error on every rank lists each member's call, and if a
member never arrives, the others stop waiting after a timeout.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.errors import CommunicationError
from megazero.mpu.group import DONE, Reduction, Transfer, Work


class ThreadMeeting:
    """What the threads of one group share: a slot per member, a barrier, and mailboxes."""

    def __init__(self, ranks: tuple[int, ...], timeout: float):
        self.ranks = ranks
        self.timeout = timeout
        self.barrier = threading.Barrier(len(ranks))
        self.calls: list[Any] = [None] * len(ranks)
        self.tensors: list[Any] = [None] * len(ranks)
        self.mail: dict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)
        self.arrived = threading.Condition()
        self.broken = False

    def abort(self) -> None:
        """Wake everyone who is waiting here; their calls fail."""
        with self.arrived:
            self.broken = True
            self.arrived.notify_all()
        self.barrier.abort()


class ThreadWorld:
    """All meetings of one world of threads.

    Args:
        size: number of ranks.
        timeout: how many seconds a rank waits for the others in one call.
    """

    def __init__(self, size: int, timeout: float = 60.0):
        self.size = size
        self.timeout = timeout
        self._meetings: dict[tuple[str, tuple[int, ...]], ThreadMeeting] = {}
        self._lock = threading.Lock()

    def meeting(self, name: str, ranks: tuple[int, ...]) -> ThreadMeeting:
        with self._lock:
            return self._meetings.setdefault((name, ranks), ThreadMeeting(ranks, self.timeout))

    def group(self, name: str, rank: int, ranks: tuple[int, ...]) -> ThreadGroup:
        return ThreadGroup(name, ranks.index(rank), self.meeting(name, ranks))

    def abort(self) -> None:
        with self._lock:
            for meeting in self._meetings.values():
                meeting.abort()

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Call ``work(rank)`` on one thread per rank and return the results in rank order.

        The earliest failure ends the other ranks and is raised here.
        """
        results: list[Any] = [None] * self.size
        failures: list[tuple[int, BaseException]] = []
        core = this_core()

        def body(rank: int) -> None:
            # The ranks take turns holding the interpreter lock, and passing it between cores costs several
            # times as much as their work does: 21.6 s against 5.2 s for five steps of eight ranks.
            if core is not None:
                os.sched_setaffinity(0, {core})
            try:
                results[rank] = work(rank)
            except BaseException as error:  # handed to the caller below
                failures.append((rank, error))
                self.abort()

        threads = [threading.Thread(target=body, args=(r,), name=f"rank {r}") for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            rank, error = failures[0]
            error.add_note(f"on rank {rank} of {self.size}") if hasattr(error, "add_note") else None
            raise error
        return results


class ThreadGroup:
    """One thread's end of a `ThreadMeeting`."""

    def __init__(self, name: str, rank: int, meeting: ThreadMeeting):
        self.name = name
        self.rank = rank
        self.ranks = meeting.ranks
        self._meeting = meeting

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False) -> Work:
        total = self._meet(f"all_reduce({op})", tensor, lambda all_: _reduce(all_, op))
        tensor.copy_(total)
        return DONE

    def all_gather(self, output: Tensor, tensor: Tensor, *, async_op: bool = False) -> Work:
        output.copy_(
            self._meet(
                "all_gather", tensor, lambda all_: torch.cat([t.flatten() for t in all_]).view(output.shape)
            )
        )
        return DONE

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False
    ) -> Work:
        def mine(all_: list[Tensor]) -> Tensor:
            pieces = [t.reshape(self.size, -1)[self.rank] for t in all_]
            return _reduce(pieces, op).view(output.shape)

        output.copy_(self._meet(f"reduce_scatter({op})", tensor, mine))
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

        def mine(all_: list[tuple[Tensor, ...]]) -> Tensor:
            return torch.cat([pieces[self.rank] for pieces in all_])

        received = self._meet("all_to_all", tensor.split(sizes), mine, signature=str(tensor.dtype))
        if received.shape != output.shape:
            raise CommunicationError(
                f"`all_to_all` over group `{self.name}` brought {tuple(received.shape)} to rank "
                f"{self.rank}, but its output has {tuple(output.shape)}"
            )
        output.copy_(received)
        return DONE

    def broadcast(self, tensor: Tensor, source: int, *, async_op: bool = False) -> Work:
        value = self._meet(f"broadcast(from {source})", tensor, lambda all_: all_[source].clone())
        tensor.copy_(value)
        return DONE

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        meeting = self._meeting
        with meeting.arrived:
            for t in transfers:
                if t.kind == "send":
                    meeting.mail[self.rank, t.peer, t.tag].append(t.tensor.detach().clone())
            meeting.arrived.notify_all()
        return [DONE if t.kind == "send" else _Receipt(self, t) for t in transfers]

    def barrier(self) -> None:
        self._meet("barrier", None, lambda all_: None)

    def _meet(self, call: str, mine: Any, combine: Callable[[list[Any]], Any], signature: str = "") -> Any:
        """Show `mine` to all members and return `combine` of everyone's."""
        if isinstance(mine, Tensor):
            mine = mine.detach()
            signature = f"{tuple(mine.shape)} {mine.dtype}"
        meeting = self._meeting
        meeting.calls[self.rank] = f"{call} {signature}".strip()
        meeting.tensors[self.rank] = mine
        self._wait(call)
        calls = list(meeting.calls)
        differ = any(other != calls[0] for other in calls)
        result = None if differ else combine(list(meeting.tensors))
        self._wait(call)
        meeting.tensors[self.rank] = None  # so that no tensor is kept alive until the next call
        if differ:
            listing = "; ".join(f"rank {r}: {c}" for r, c in zip(self.ranks, calls, strict=True))
            raise CommunicationError(f"the members of group `{self.name}` made different calls: {listing}")
        return result

    def _wait(self, call: str) -> None:
        try:
            self._meeting.barrier.wait(self._meeting.timeout)
        except threading.BrokenBarrierError as error:
            raise CommunicationError(
                f"`{call}` over group `{self.name}` on rank {self.ranks[self.rank]}: another member failed "
                f"or did not arrive within {self._meeting.timeout} s"
            ) from error


class _Receipt:
    """A receive in progress; `wait` blocks until its message has arrived."""

    def __init__(self, group: ThreadGroup, transfer: Transfer):
        self.group = group
        self.transfer = transfer
        self.come = False

    def wait(self) -> None:
        if self.come:
            return
        group, t, meeting = self.group, self.transfer, self.group._meeting
        with meeting.arrived:
            box = meeting.mail[t.peer, group.rank, t.tag]
            awake = meeting.arrived.wait_for(lambda: box or meeting.broken, meeting.timeout)
            if not box:
                why = "another member failed" if awake else f"nothing came within {meeting.timeout} s"
                raise CommunicationError(
                    f"receive from rank {t.peer} (tag {t.tag}) over group `{group.name}` on rank "
                    f"{group.rank}: {why}"
                )
            message = box.popleft()
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
