"""Recordings of whole trainings: every layer through which work reaches the device, the host and the disk."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megazero.checkpoint import saver
from megazero.mpu.context import ParallelContext
from megazero.mpu.group import DONE, Group, Transfer, Work
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.streams import Streams
from megazero.mpu.wrapping_group import GroupCall, WrappingGroup
from megazero.ops.dispatch import Operator
from megazero.train.resume import keepers
from megazero.zero import delayed
from megazero.zero.bucket import Bucket
from megazero.zero.store import disk
from tests.streams.order import Clock
from tests.streams.recorder import COMPUTE, DISK, RecordedPoint, Recorder, RecordingStreams, here, muted


class RecordedWork(Work):
    """A collective or message in progress: `wait` lets the device wait, as NCCL's does.

    Until then a collective holds its tensors, as torch does; messages do not.
    """

    def __init__(self, work: Work, point: RecordedPoint, *held: Tensor):
        self.work = work
        self.point = point
        self.held = held

    def wait(self) -> None:
        with muted():
            self.work.wait()
        self.point.compute_waits()
        self.held = ()


class RecordedGroup(WrappingGroup):
    """Records what a group's own stream reads and writes; it begins after what was computed."""

    def __init__(self, inner: Group, recorder: Recorder):
        super().__init__(inner)
        self.recorder = recorder

    def _collective(self, call: GroupCall) -> Work:
        output = call.payload if call.operation == "all_gather" else call.arguments[0]
        point = self._record(call.operation, [call.given], [output])
        with muted():
            work = call.start(self.inner)
        if call.async_op:
            return RecordedWork(work, point, call.given, output)
        point.compute_waits()
        return DONE

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        sent = [t.tensor for t in transfers if t.kind == "send"]
        received = [t.tensor for t in transfers if t.kind == "recv"]
        point = self._record("exchange", sent, received)
        with muted():
            works = self.inner.exchange(transfers)
        return [RecordedWork(work, point) for work in works]

    def _record(self, what: str, reads: list[Tensor], writes: list[Tensor]) -> RecordedPoint:
        recorder, stream = self.recorder, f"group {self.name}"
        recorder.enqueue(stream, COMPUTE)
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                # What sends from the host waits there; the device's stream sends the rest.
                agent = stream
                if recorder.is_host(tensor):
                    agent = recorder.thread
                    recorder.waited_copy(what, tensor.nbytes)
                recorder.touch(agent, tensor, writes=writing, what=what)
        return RecordedPoint(recorder, recorder.order.now(stream))


class _RecordedFuture(Future):
    recorder: Recorder
    point: Clock | None = None

    def result(self, timeout: float | None = None) -> Any:
        result = super().result(timeout)
        if here() is not None and self.point is not None:
            self.recorder.order.after(self.recorder.thread, self.point)
        return result


class RecordedThreads(ThreadPoolExecutor):
    """Threads whose work begins after what the submitting thread did, and is waited for by `result`."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        place = here()
        if place is None:
            return super().submit(work, *args, **kwargs)
        recorder, point = place[0], place[0].order.now(place[1])

        def run() -> Any:
            name = f"thread {threading.current_thread().name}"
            with recorder.on_thread(name, point):
                try:
                    return work(*args, **kwargs)
                finally:
                    ends.append(recorder.order.now(name))

        ends: list[Clock] = []
        future = super().submit(run)
        future.__class__ = _RecordedFuture
        future.recorder = recorder
        future.add_done_callback(lambda done: setattr(done, "point", ends[0] if ends else None))
        return future


def _waited(futures: Sequence[Future]) -> None:
    wait(futures)
    for future in futures:
        if isinstance(future, _RecordedFuture) and future.exception() is None:
            future.result()


def _start(self: Any, call: Callable[..., int], start: int, whole: memoryview) -> Any:
    requests, place = _START(self, call, start, whole), here()
    if place is None or not len(whole):
        return requests
    recorder, memory = place[0], torch.frombuffer(whole, dtype=torch.uint8)
    recorder.enqueue(DISK)
    reads = call is disk.os.preadv
    recorder.touch(DISK, memory, writes=reads, what="read from disk" if reads else "written to disk")
    point = RecordedPoint(recorder, recorder.order.now(DISK))
    return _RecordedRequests(requests.requests, point)


class _RecordedRequests(disk._Requests):
    def __init__(self, requests: list, point: RecordedPoint):
        super().__init__(requests)
        object.__setattr__(self, "point", point)

    def wait(self) -> None:
        super().wait()
        self.point.host_waits()


_START = disk._OpenFile.start


def _mapped(self: Any, size: int) -> Any:
    memory, place = _MAPPED(self, size), here()
    if place is not None:
        place[0].host_memory(torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), size)
    return memory


_MAPPED = disk._OpenFile.mapped


def _allocate(self: Bucket, numel: int) -> None:
    place = here()
    if place is not None and not numel and self.storage.nbytes():
        place[0].enqueue(COMPUTE)
        place[0].touch(COMPUTE, self.full, writes=True, what="emptied")
    _ALLOCATE(self, numel)


_ALLOCATE = Bucket._allocate


def _tolist(self: Tensor) -> Any:
    place = here()
    if place is not None:
        recorder, thread = place
        if recorder.is_host(self):
            recorder.touch(thread, self, writes=False, what="tolist")
        else:  # the host may read losses and norms a step later, so no order may come from that
            recorder.enqueue(COMPUTE)
            recorder.touch(COMPUTE, self, writes=False, what="tolist")
    return _TOLIST(self)


_TOLIST = Tensor.tolist


def _random_states(device: torch.device) -> dict[str, Tensor]:
    """The states of the host's generators, which are the host's."""
    states, place = _RANDOM_STATES(device), here()
    for state in states.values() if place is not None else ():
        place[0].host_tensor(state)
    return states


_RANDOM_STATES = keepers.random_state


def _write(self: saver.Saver, folder: Any, parts: Any, beside: str = "") -> Any:
    place = here()
    for part in parts if place is not None else ():
        recorder, thread = place
        if recorder.is_host(part.tensor):
            recorder.touch(thread, part.tensor, writes=False, what="written to a checkpoint")
        else:  # it is copied to the host first, which waits
            recorder.operation("aten::_local_scalar_dense", [part.tensor], [], [])
    with muted():
        return _WRITE(self, folder, parts, beside)


_WRITE = saver.Saver._write


@contextlib.contextmanager
def recordings() -> Iterator[None]:
    """Context in which recorders see everything; operators run by their references, which torch sees."""
    with contextlib.ExitStack() as stack:
        for target, name, new in (
            (Operator, "choose", lambda self, facts: self.implementations[-1]),
            (delayed, "helper_pool", RecordedThreads),
            (saver, "helper_pool", RecordedThreads),
            (saver, "wait", _waited),
            (saver.Saver, "_write", _write),
            (disk._OpenFile, "start", _start),
            (disk._OpenFile, "mapped", _mapped),
            (Bucket, "_allocate", _allocate),
            (Tensor, "tolist", _tolist),
            (keepers, "random_state", _random_states),
        ):
            stack.enter_context(mock.patch.object(target, name, new))
        yield


def recorded_context(
    context: ParallelContext, recorder: Recorder, streams: Streams | None = None
) -> ParallelContext:
    """A rank's context whose copies and messages are recorded."""
    wrapped = {
        id(group): group if isinstance(group, SoloGroup) else RecordedGroup(group, recorder)
        for group in context.groups.values()
    }
    groups = {name: wrapped[id(group)] for name, group in context.groups.items()}
    return replace(context, groups=groups, streams=streams or RecordingStreams(recorder))
