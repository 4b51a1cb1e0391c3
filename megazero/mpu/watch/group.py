"""`WatchedGroup`: any `Group`, with every call recorded by a `Watch`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from megazero.errors import CommunicationError
from megazero.mpu.group import DONE, Group, Transfer, Work
from megazero.mpu.messages import gather_values
from megazero.mpu.watch.log import Call
from megazero.mpu.watch.watch import Watch
from megazero.mpu.wrapping_group import GroupCall, WrappingGroup


def watched(group: Group, watch: Watch, *, check_on: torch.device | str | None = None) -> Group:
    """A group of several members as a `WatchedGroup`; a group of one as it is."""
    return group if group.size == 1 else WatchedGroup(group, watch, check_on)


class WatchedGroup(WrappingGroup):
    """A group whose calls are recorded before they start, and raise `CommunicationError` once the job fails.

    Args:
        inner: the group that carries out the calls.
        watch: records them.
        check_on: if given, the members compare their calls before each collective, by another collective on
            tensors on this device. This is slow, but raises an error at the first call that differs. Messages
            of `exchange` are not compared.

    Raises (every call):
        CommunicationError: the call failed, the members' calls differ, or the job has failed elsewhere.
    """

    def __init__(self, inner: Group, watch: Watch, check_on: torch.device | str | None = None):
        super().__init__(inner)
        self.watch = watch
        self._check_on = check_on
        self._channel = watch.collective_channel(inner.name, inner.ranks)

    def _collective(self, call: GroupCall) -> Work:
        shape: tuple[int | str, ...] = call.given.shape
        if call.operation == "all_to_all" and call.arguments[2:] != (None, None):
            # With splits each member has its own number of rows, which a star stands for.
            shape = ("*", *shape[1:])
        watch, later = self.watch, call.async_op
        noted = watch.begin(self._channel, call.operation, call.detail, shape, call.given.dtype)
        try:
            if self._check_on is not None:
                self._compare(noted)
            began = watch.waits.begin(later=later)
            work = call.start(self.inner)
            watch.waits.end(began)
        except Exception as error:
            raise watch.fail(noted, error) from error
        if later:
            return self._follow(noted, work)
        watch.finish(noted)
        return work

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        if not transfers:
            return []
        calls = [self._begin_message(transfer) for transfer in transfers]
        try:
            works = self.inner.exchange(transfers)
        except Exception as error:
            raise self.watch.fail(calls[0], error) from error
        return [self._follow(call, work) for call, work in zip(calls, works, strict=True)]

    def barrier(self) -> None:
        call = self.watch.begin(self._channel, "barrier", None, None, None)
        try:
            if self._check_on is not None:
                self._compare(call)
            began = self.watch.waits.begin()
            self.inner.barrier()
            self.watch.waits.end(began)
        except Exception as error:
            raise self.watch.fail(call, error) from error
        self.watch.finish(call)

    def _begin_message(self, transfer: Transfer) -> Call:
        peer = self.ranks[transfer.peer]
        me = self.ranks[self.rank]
        ends = (me, peer) if transfer.kind == "send" else (peer, me)
        channel = self.watch.message_channel(self._channel, ends, transfer.tag)
        return self.watch.begin(channel, transfer.kind, None, transfer.tensor.shape, transfer.tensor.dtype)

    def _follow(self, call: Call, work: Work) -> Work:
        if work is DONE:
            self.watch.finish(call)
            return work
        self.watch.leave_open(call, work)
        return WatchedWork(call, work, self.watch)

    def _compare(self, call: Call) -> None:
        record = self.watch.record(call)
        digest = hashlib.blake2b(record.signature.encode(), digest_size=8).digest()
        mine = torch.tensor([int.from_bytes(digest, "big", signed=True)], device=self._check_on)
        everyone = torch.empty(self.size, dtype=mine.dtype, device=self._check_on)
        self.inner.all_gather(everyone, mine).wait()
        if bool((everyone == mine).all()):
            return
        calls = gather_values(self.inner, f"{record.operation} at {record.place}", mine.device)
        listing = "; ".join(f"rank {rank} made {call}" for rank, call in zip(self.ranks, calls, strict=True))
        raise CommunicationError(
            f"the members of group `{self.name}` must make the same calls, but differ at call "
            f"{call.sequence}: {listing}"
        )


class WatchedWork(Work):
    """A call in progress: waiting for it is recorded, and so is dropping it without a wait."""

    def __init__(self, call: Call, work: Work, watch: Watch):
        self._call: Call | None = call
        self._work = work
        self._watch = watch

    def wait(self) -> object:
        """Return when the result is ready.

        Raises:
            CommunicationError: the call failed, or the job has failed elsewhere.
        """
        call = self._call
        if call is None:
            return self._work.wait()
        self._watch.wait_for(call)
        try:
            began = self._watch.waits.begin()
            result = self._work.wait()
            self._watch.waits.end(began)
        except Exception as error:
            raise self._watch.fail(call, error) from error
        self._call = None
        self._watch.finish(call)
        return result

    def __del__(self) -> None:
        if self._call is not None:
            self._watch.finish(self._call, given_up=True)
