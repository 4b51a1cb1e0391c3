"""Faults in the order of things, planted where the order is made: a recording must show a race for each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor

from megazero.checkpoint.saver import Saver
from megazero.layers.input_offload import AwayInput
from megazero.mpu.streams import REACHED
from megazero.pipeline import executor
from megazero.zero.bucket import Bucket
from megazero.zero.reduce import GradientReducer
from megazero.zero.store.offload import OffloadStore
from megazero.zero.store.slices import Slices
from megazero.zero.store.transfers import PendingRead, PendingWrite, Ring, Transfers
from tests.layouts.layout import Layout
from tests.streams.recorder import COMPUTE, COPY, RecordedPoint, RecordingStreams
from tests.streams.runs import Run

TWO = {"dp": 2, "micro_batch": 2}
ON_HOST = Run(Layout(zero=3, store="cpu", dtype="bf16", **TWO))
SUMS = Run(Layout(zero=2, dtype="bf16", **TWO), {"optimizer": "cpu"})
ONCE = Run(Layout(zero=2, dtype="bf16", dp=2, micro_batch=4), {"optimizer": "cpu"})
AGAIN = Run(Layout(dtype="bf16", micro_batch=4), {"optimizer": "cpu"}, repeats=True)
WHOLE = Run(Layout(dtype="bf16", micro_batch=4), {"optimizer": "cpu"})
ON_DISK = Run(Layout(zero=3, store="nvme", **TWO))
SLICES = Run(Layout(zero=3, dtype="bf16", **TWO), {"parameters": "cpu"})
SLICES_ON_DISK = Run(Layout(zero=3, dtype="bf16", **TWO), {"parameters": "nvme"})
UNUSED = Run(Layout(zero=3, layers=4, micro_batch=4, method="layer-drop"), {"parameters": "cpu"}, steps=3)
HALF = Run(Layout(zero=1, dtype="bf16", **TWO), {"optimizer": "cpu", "gradients": "none"})
INPUTS = Run(Layout(micro_batch=4, layers=4), inputs=True)
SAVED = Run(Layout(micro_batch=4), saves=True)
DELAYED = Run(
    Layout(zero=2, dtype="bf16", **TWO),
    {"optimizer": "cpu", "delayed_param_update": True, "delayed_param_update_start": 0},
)
PIPELINE = Run(Layout(pp=2, micro_batch=2))
GATHERED = Run(Layout(zero=3, **TWO))


@dataclass(frozen=True)
class Plant:
    """A fault: what replaces a method, and a training that must show it."""

    name: str
    run: Run
    owner: Any
    method: str
    makes: Callable[[Callable[..., Any]], Callable[..., Any]]

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Context with the fault."""
        with mock.patch.object(self.owner, self.method, self.makes(getattr(self.owner, self.method))):
            yield


def without(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The method, within which another one does nothing."""

    def makes(method: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(owner, name, _no_method):
                return method(*args, **kwargs)

        return faulty

    return makes


def _no_method(*args: Any) -> None:
    return None


def nothing(method: Callable[..., Any]) -> Callable[..., Any]:
    """No method at all."""
    return _no_method


def _put_first(method: Callable[..., Any]) -> Callable[..., Any]:
    def end(self: PendingWrite) -> None:
        if self.target is None:
            method(self)
        else:
            self.tier.put(self.slot, self.target)
            self.point.host_waits()

    return end


def _dropped_first(method: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: Transfers, pending: PendingRead) -> None:
        pending.tier.drop(pending.slot, pending.content)

    return read


def _lasting(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, source, target, *, lasting=False: method(self, source, target, lasting=True)


def _early(method: Callable[..., Any]) -> Callable[..., Any]:
    """A ring that forgets when its buffer may be used again."""
    return lambda self, point: method(self, REACHED)


def _waits_later(method: Callable[..., Any]) -> Callable[..., Any]:
    def take(self: Slices, slot: Any, device: Any) -> Tensor:
        points: list[RecordedPoint] = []
        with mock.patch.object(RecordedPoint, "compute_waits", lambda self: points.append(self)):
            on_device = method(self, slot, device)
        on_device.clone()
        for point in points:
            point.compute_waits()
        return on_device

    return take


def _reads_first(method: Callable[..., Any]) -> Callable[..., Any]:
    def take(self: AwayInput) -> Tensor:
        self.fetch()
        here = self._here
        assert here is not None
        here.clone()
        return method(self)

    return take


def _no_event(method: Callable[..., Any]) -> Callable[..., Any]:
    """Copies that do not wait for what was computed."""
    return lambda self: self.recorder.enqueue(COPY)


def _own_stream(method: Callable[..., Any]) -> Callable[..., Any]:
    """Each copy on a stream of its own, so that none comes after earlier ones."""

    def make_copy(self: RecordingStreams, target: Tensor, source: Tensor) -> Any:
        self.stream = f"copy of {target.data_ptr()}"
        self.recorder.enqueue(self.stream, COMPUTE)
        return method(self, target, source)

    return make_copy


COMPUTE_WAITS = without(RecordedPoint, "compute_waits")
HOST_WAITS = without(RecordedPoint, "host_waits")

PLANTS = (
    Plant("copies do not wait for what is computed", SUMS, RecordingStreams, "before_copy", _no_event),
    Plant("slices are read before they have arrived", SLICES, Slices, "take", COMPUTE_WAITS),
    Plant("the wait for a slice comes after its first reader", SLICES, Slices, "take", _waits_later),
    Plant("a slice read for nothing is let go of at once", UNUSED, Slices, "read_ahead", COMPUTE_WAITS),
    Plant("weights are read before they are back", WHOLE, Transfers, "weights_to_device", COMPUTE_WAITS),
    Plant("sums are used on the host before they have arrived", SUMS, PendingWrite, "end", HOST_WAITS),
    Plant(
        "sums are read without asking whether they are under way", ONCE, Transfers, "finish_write", nothing
    ),
    Plant("sums are written to disk before they have arrived", ON_DISK, PendingWrite, "end", _put_first),
    Plant(
        "a disk's buffer is given back while it is copied", SLICES_ON_DISK, Transfers, "read", _dropped_first
    ),
    Plant("a buffer is released without a wait", SLICES_ON_DISK, PendingRead, "end", HOST_WAITS),
    Plant("buffers are used one bucket early", SUMS, Ring, "until", _early),
    Plant("the device's buffer is filled without a wait", SUMS, Ring, "take", COMPUTE_WAITS),
    Plant("the host's buffers are filled without a wait", WHOLE, Ring, "take", HOST_WAITS),
    Plant("a transient buffer is copied from directly", SUMS, Transfers, "to_host", _lasting),
    Plant(
        "the device's sums are overwritten while they are copied", AGAIN, OffloadStore, "sums", COMPUTE_WAITS
    ),
    Plant("sums that the device keeps are read on the host early", HALF, OffloadStore, "_fetch", HOST_WAITS),
    Plant("an update is not waited for", DELAYED, OffloadStore, "_finish", nothing),
    Plant("an input leaves the device before it is on the host", INPUTS, AwayInput, "leave", COMPUTE_WAITS),
    Plant("an input is read before it is back", INPUTS, AwayInput, "take", _reads_first),
    Plant("copies are not made in order", SAVED, RecordingStreams, "make_copy", _own_stream),
    Plant("a save does not wait for its copies", SAVED, RecordedPoint, "host_waits", nothing),
    Plant("an update does not wait for a save's copies", SAVED, Saver, "wait_for_copies", nothing),
    Plant("a message is read before it has come", PIPELINE, executor._Forwards, "_take", COMPUTE_WAITS),
    Plant("a message is let go of while it is sent", PIPELINE, executor._Sent, "wait", nothing),
    Plant("weights are read while they are gathered", GATHERED, Bucket, "wait", COMPUTE_WAITS),
    Plant("sums are added before they are reduced", GATHERED, GradientReducer, "_land", COMPUTE_WAITS),
)
