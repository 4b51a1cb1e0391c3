"""Groups that look at what they are asked to communicate as late as they may, and groups that remember it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch

from megazero.mpu import Group, ParallelContext, Work


class LateGroup:
    """Carries an asynchronous collective out when it, or a later one, is waited for."""

    def __init__(self, group: Group):
        self._group = group
        self._pending: deque[Callable[[], Work]] = deque()

    def __getattr__(self, name: str):
        return getattr(self._group, name)

    def all_reduce(self, tensor, op="sum", *, async_op=False) -> Work:
        return self._later(lambda: self._group.all_reduce(tensor, op), async_op)

    def all_gather(self, output, tensor, *, async_op=False) -> Work:
        return self._later(lambda: self._group.all_gather(output, tensor), async_op)

    def reduce_scatter(self, output, tensor, op="sum", *, async_op=False) -> Work:
        return self._later(lambda: self._group.reduce_scatter(output, tensor, op), async_op)

    def _later(self, call: Callable[[], Work], async_op: bool) -> Work:
        self._pending.append(call)
        work = _LateWork(self._pending, call)
        if not async_op:
            work.wait()
        return work


class _LateWork:
    def __init__(self, pending: deque, call: Callable[[], Work]):
        self._pending, self._call = pending, call

    def wait(self) -> None:
        while self._call in self._pending:
            self._pending.popleft()().wait()


class SpyGroup:
    """Writes down each collective: (operation, dtype, elements of the larger side)."""

    def __init__(self, group: Group, calls: list[tuple[str, torch.dtype, int]]):
        self._group = group
        self._calls = calls

    def __getattr__(self, name: str):
        return getattr(self._group, name)

    def all_reduce(self, tensor, op="sum", *, async_op=False) -> Work:
        self._calls.append(("all_reduce", tensor.dtype, tensor.numel()))
        return self._group.all_reduce(tensor, op, async_op=async_op)

    def all_gather(self, output, tensor, *, async_op=False) -> Work:
        self._calls.append(("all_gather", output.dtype, output.numel()))
        return self._group.all_gather(output, tensor, async_op=async_op)

    def reduce_scatter(self, output, tensor, op="sum", *, async_op=False) -> Work:
        self._calls.append(("reduce_scatter", tensor.dtype, tensor.numel()))
        return self._group.reduce_scatter(output, tensor, op, async_op=async_op)


def with_late_groups(context: ParallelContext) -> ParallelContext:
    """The context with every group late; communicators over the same ranks stay one group."""
    return _wrapped(context, LateGroup)


def with_spies(context: ParallelContext, calls: list) -> ParallelContext:
    """The context with the calls of all groups in `calls`."""
    return _wrapped(context, lambda group: SpyGroup(group, calls))


def _wrapped(context: ParallelContext, wrap: Callable[[Group], Group]) -> ParallelContext:
    wrapped = {id(group): wrap(group) for group in context.groups.values()}
    return replace(context, groups={name: wrapped[id(group)] for name, group in context.groups.items()})
