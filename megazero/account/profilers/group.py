"""Groups whose calls listeners observe: when the host enters and leaves each call and each wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

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
"""The operations that listeners observe; of messages in one exchange, all are entered before any is left."""


class Listener:
    """Observes the calls of groups. `leaves` gets what `enters` returned."""

    def enters(self, call: CollectiveCall, *, waits: bool) -> object:
        """Called when the host begins a call, or, if `waits`, begins to wait for an earlier one."""

    def leaves(self, call: CollectiveCall, entered: object, *, waits: bool) -> None:
        """Called when the host goes on. Over NCCL, work that it queues from now on runs after the call."""


class ObservedGroup(WrappingGroup):
    """A group whose calls listeners observe.

    Args:
        inner: carries out the calls.
        listeners: the listeners, in the order of their calls.
        name: the group's name for the listeners.
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

    def _left(self, call: CollectiveCall, entered: Sequence[object], *, waits: bool) -> None:
        for listener, token in zip(self.listeners, entered, strict=True):
            listener.leaves(call, token, waits=waits)


class ObservedWork(Work):
    """An asynchronous call, whose first wait listeners observe.

    Args:
        call: the call.
        work: the inner group's handle of the call.
        group: has the listeners.
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
    """The context with every group of more than one rank wrapped for the listeners."""
    groups = {
        name: group if group.size == 1 else ObservedGroup(group, listeners, name)
        for name, group in context.groups.items()
    }
    return replace(context, groups=groups)
