"""Groups whose calls are shown to listeners: when the host enters and leaves each, and each wait for one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from megazero.account.profilers.calls import CollectiveCall
from megazero.mpu.context import ParallelContext
from megazero.mpu.group import DONE, Group, Transfer, Work
from megazero.mpu.wrapping_group import GroupCall, WrappingGroup

OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send",
    "recv",
    "barrier",
)
"""The operations that listeners are shown; all messages of a batch are entered before the first is left."""


class Listener:
    """Is shown the calls of groups. What `enters` returns is given back to `leaves`."""

    def enters(self, call: CollectiveCall, *, waits: bool) -> Any:
        """The host begins a call, or, if `waits`, a wait for one that it began before."""

    def leaves(self, call: CollectiveCall, entered: Any, *, waits: bool) -> None:
        """The host goes on. Over NCCL, what it queues from now on comes after the call."""


class ObservedGroup(WrappingGroup):
    """A group whose calls are shown to listeners.

    Args:
        inner: carries out the calls.
        listeners: are shown them, in this order.
        name: the name by which they know the group.
    """

    def __init__(self, inner: Group, listeners: Sequence[Listener], name: str):
        super().__init__(inner, name)
        self.listeners = tuple(listeners)
        self._numbers = count()

    def _collective(self, call: GroupCall) -> Work:
        payload = call.payload
        shown = self._call(call.operation, payload.numel() * payload.element_size(), later=call.async_op)
        entered = [listener.enters(shown, waits=False) for listener in self.listeners]
        work = call.start(self.inner)
        later = call.async_op and work is not DONE
        self._left(replace(shown, later=later), entered, waits=False)
        return ObservedWork(shown, work, self) if later else work

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        if not transfers:
            return []
        sizes = [t.tensor.numel() * t.tensor.element_size() for t in transfers]
        calls = [self._call(t.kind, size, later=True) for t, size in zip(transfers, sizes, strict=True)]
        entered = [[listener.enters(call, waits=False) for listener in self.listeners] for call in calls]
        works = self.inner.exchange(transfers)
        for call, tokens in zip(calls, entered, strict=True):
            self._left(call, tokens, waits=False)
        return [ObservedWork(call, work, self) for call, work in zip(calls, works, strict=True)]

    def barrier(self) -> None:
        call = self._call("barrier", 0, later=False)
        entered = [listener.enters(call, waits=False) for listener in self.listeners]
        self.inner.barrier()
        self._left(call, entered, waits=False)

    def _call(self, operation: str, nbytes: int, *, later: bool) -> CollectiveCall:
        return CollectiveCall(self.name, operation, nbytes, self.ranks, later, next(self._numbers))

    def _left(self, call: CollectiveCall, entered: Sequence[Any], *, waits: bool) -> None:
        for listener, token in zip(self.listeners, entered, strict=True):
            listener.leaves(call, token, waits=waits)


class ObservedWork(Work):
    """A call in progress, the first wait for which is shown.

    Args:
        call: the call.
        work: its work.
        group: knows the listeners.
    """

    def __init__(self, call: CollectiveCall, work: Work, group: ObservedGroup):
        self._call = call
        self._work = work
        self._group: ObservedGroup | None = group

    def wait(self) -> object:
        """Return when the result is ready."""
        group, self._group = self._group, None
        if group is None:
            return self._work.wait()
        entered = [listener.enters(self._call, waits=True) for listener in group.listeners]
        result = self._work.wait()
        group._left(self._call, entered, waits=True)
        return result


def observed(context: ParallelContext, listeners: Sequence[Listener]) -> ParallelContext:
    """The same context with every communicator of more than one rank observed, under each of its names."""
    groups = {
        name: group if group.size == 1 else ObservedGroup(group, listeners, name)
        for name, group in context.groups.items()
    }
    return replace(context, groups=groups)
