"""Groups that look at what they are asked to communicate as late as they may, and groups that remember it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch

from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Group, Work
from megazero.mpu.wrapping_group import GroupCall, WrappingGroup


class LateGroup(WrappingGroup):
    """Carries an asynchronous collective out when it, or a later one, is waited for."""

    def __init__(self, inner: Group):
        super().__init__(inner)
        self._pending: deque[GroupCall] = deque()

    def _collective(self, call: GroupCall) -> Work:
        self._pending.append(call)
        work = _LateWork(self.inner, self._pending, call)
        if not call.async_op:
            work.wait()
        return work


class _LateWork:
    def __init__(self, group: Group, pending: deque[GroupCall], call: GroupCall):
        self._group, self._pending, self._call = group, pending, call

    def wait(self) -> None:
        while any(call is self._call for call in self._pending):
            self._pending.popleft().start(self._group).wait()


class SpyGroup(WrappingGroup):
    """Writes down each collective: (operation, dtype, elements of the larger side)."""

    def __init__(self, inner: Group, calls: list[tuple[str, torch.dtype, int]]):
        super().__init__(inner)
        self._calls = calls

    def _collective(self, call: GroupCall) -> Work:
        self._calls.append((call.operation, call.payload.dtype, call.payload.numel()))
        return call.start(self.inner)


def with_late_groups(context: ParallelContext) -> ParallelContext:
    """The context with every group late; communicators over the same ranks stay one group."""
    return _wrapped(context, LateGroup)


def with_spies(context: ParallelContext, calls: list) -> ParallelContext:
    """The context with the calls of all groups in `calls`."""
    return _wrapped(context, lambda group: SpyGroup(group, calls))


def _wrapped(context: ParallelContext, wrap: Callable[[Group], Group]) -> ParallelContext:
    wrapped = {id(group): wrap(group) for group in context.groups.values()}
    return replace(context, groups={name: wrapped[id(group)] for name, group in context.groups.items()})
