"""`WatchedGroup`: any `Group`, with every call noted by a `Watch`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megazero.errors import CommunicationError
from megazero.mpu.group import DONE, Group, Reduction, Transfer, Work
from megazero.mpu.messages import gather_values
from megazero.mpu.watch.log import Call

if TYPE_CHECKING:
    from megazero.mpu.watch.watch import Watch


class WatchedGroup:
    """A group whose calls are noted before they start and raise `CommunicationError` once the job has failed.

    Args:
        inner: carries the calls out.
        watch: notes them.
        check_on: where given, the members compare their calls before each collective, by another one on
            tensors of this device: slow, and an error at the first call that differs. Messages of `exchange`
            are not compared.

    Raises (every call):
        CommunicationError: the call failed, the members' calls differ, or the job has failed elsewhere.
    """

    def __init__(self, inner: Group, watch: Watch, check_on: torch.device | str | None = None):
        self.inner = inner
        self.watch = watch
        self.name = inner.name
        self.rank = inner.rank
        self.ranks = inner.ranks
        self._check_on = check_on
        self._lane = watch.collective_lane(inner.name, inner.ranks)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False) -> Work:
        return self._run("all_reduce", op, tensor, self.inner.all_reduce, (tensor, op), async_op)

    def all_gather(self, output: Tensor, tensor: Tensor, *, async_op: bool = False) -> Work:
        return self._run("all_gather", None, tensor, self.inner.all_gather, (output, tensor), async_op)

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False
    ) -> Work:
        collective = self.inner.reduce_scatter
        return self._run("reduce_scatter", op, tensor, collective, (output, tensor, op), async_op)

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Work:
        # With splits every member has another number of rows, and says so by a star.
        shape = tensor.shape if input_splits is None and output_splits is None else ("*", *tensor.shape[1:])
        arguments = (output, tensor, output_splits, input_splits)
        return self._run("all_to_all", None, tensor, self.inner.all_to_all, arguments, async_op, shape)

    def broadcast(self, tensor: Tensor, source: int, *, async_op: bool = False) -> Work:
        return self._run("broadcast", source, tensor, self.inner.broadcast, (tensor, source), async_op)

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
        call = self.watch.begin(self._lane, "barrier", None, None, None)
        try:
            self._compare(call)
            self.inner.barrier()
        except Exception as error:
            raise self.watch.fail(call, error) from error
        self.watch.finish(call)

    def close(self) -> None:
        """Close the inner group, if it is of a kind that is closed."""
        close = getattr(self.inner, "close", None)
        if close is not None:
            close()

    def _run(
        self,
        what: str,
        detail: str | int | None,
        tensor: Tensor,
        collective: Callable[..., Work],
        arguments: tuple,
        async_op: bool,
        shape: Sequence[int | str] | None = None,
    ) -> Work:
        shape = tensor.shape if shape is None else shape
        call = self.watch.begin(self._lane, what, detail, shape, tensor.dtype)
        try:
            self._compare(call)
            work = collective(*arguments, async_op=async_op)
        except Exception as error:
            raise self.watch.fail(call, error) from error
        if async_op:
            return self._follow(call, work)
        self.watch.finish(call)
        return work

    def _begin_message(self, transfer: Transfer) -> Call:
        peer = self.ranks[transfer.peer]
        me = self.ranks[self.rank]
        ends = (me, peer) if transfer.kind == "send" else (peer, me)
        lane = self.watch.message_lane(self._lane, ends, transfer.tag)
        return self.watch.begin(lane, transfer.kind, None, transfer.tensor.shape, transfer.tensor.dtype)

    def _follow(self, call: Call, work: Work) -> Work:
        if work is DONE:
            self.watch.finish(call)
            return work
        self.watch.leave_open(call, work)
        return WatchedWork(call, work, self.watch)

    def _compare(self, call: Call) -> None:
        if self._check_on is None:
            return
        record = self.watch.record(call)
        digest = hashlib.blake2b(record.signature.encode(), digest_size=8).digest()
        mine = torch.tensor([int.from_bytes(digest, "big", signed=True)], device=self._check_on)
        everyone = torch.empty(self.size, dtype=mine.dtype, device=self._check_on)
        self.inner.all_gather(everyone, mine).wait()
        if bool((everyone == mine).all()):
            return
        told = gather_values(self.inner, f"{record.call} at {record.place}", self._check_on)
        listing = "; ".join(f"rank {rank} made {call}" for rank, call in zip(self.ranks, told, strict=True))
        raise CommunicationError(
            f"the members of group `{self.name}` must make the same calls, but differ at call "
            f"{call.sequence}: {listing}"
        )


class WatchedWork:
    """A call under way: waiting for it is noted, and so is that nobody holds it any more."""

    def __init__(self, call: Call, work: Work, watch: Watch):
        self._call: Call | None = call
        self._work = work
        self._watch = watch

    def wait(self) -> object:
        """Return when the result is there.

        Raises:
            CommunicationError: the call failed, or the job has failed elsewhere.
        """
        call = self._call
        if call is None:
            return self._work.wait()
        self._watch.wait_for(call)
        try:
            result = self._work.wait()
        except Exception as error:
            raise self._watch.fail(call, error) from error
        self._call = None
        self._watch.finish(call)
        return result

    def __del__(self) -> None:
        if self._call is not None:
            self._watch.finish(self._call)
