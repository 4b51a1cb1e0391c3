"""A recorder of one rank: what its device would compute and copy, what its host does, and in which order.

Everything runs on the CPU and at once. But each operation of torch is taken for one that is queued on the
device's stream, unless it works on the host's memory: what a `Slab` has locked, a mapped file, and whatever
is made from these. An operation on both is a copy for which the host waits.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megazero.mpu.streams import Point, Streams
from tests.streams.order import Clock, Order

COMPUTE, COPY, DISK = "compute", "copy", "disk"
_MAKES_NO_CONTENT = ("aten::empty", "aten::new_empty")
_HERE = threading.local()


def here() -> tuple[Recorder, str] | None:
    """The recorder of this thread's rank, and the thread's name there; None outside a recording."""
    return getattr(_HERE, "place", None)


class Recorder:
    """Records one rank.

    Args:
        quick: whether every copy has been made when somebody looks; otherwise none has.

    Attributes:
        order: what is known.
        copied: bytes that were copied on the copy stream.
        blocking: copies between device and host in the queue of what is computed, by operation.
        blocking_bytes: their bytes.
    """

    def __init__(self, *, quick: bool = False):
        self.order = Order()
        self.copied = 0
        self.blocking: Counter[str] = Counter()
        self.blocking_bytes = 0
        self.quick = quick
        self._counts = False
        self._regions: dict[int, int] = {}  # start -> stop, of the host's memory
        self._starts: list[int] = []
        self._storages: dict[int, tuple[int, str]] = {}  # by the C++ object: number, and whose
        self._count = 0

    @contextlib.contextmanager
    def on_thread(self, name: str = "host", point: Clock | None = None) -> Iterator[None]:
        """Record what this thread does within the block, after a point of another agent."""
        before = here()
        _HERE.place = self, name
        self.order.after(name, point or {})
        try:
            with _Watching(self):
                yield
        finally:
            _HERE.place = before

    @property
    def thread(self) -> str:
        """The name of this thread."""
        place = here()
        return "host" if place is None else place[1]

    def host_memory(self, start: int, size: int) -> Callable[[], None]:
        """Take memory for the host's; returns what ends that, after all copies."""
        self._regions[start] = start + size
        bisect.insort(self._starts, start)

        def end() -> None:
            self.order.after(self.thread, self.order.now(COPY))
            self.order.access(self.thread, ("host", start), 0, size, writes=True, what="unmapped")
            self.order.forget(("host", start))
            if self._regions.pop(start, None):
                self._starts.remove(start)

        return end

    def host_tensor(self, tensor: Tensor) -> None:
        """Take a tensor that torch's operators did not make for the host's."""
        self._adopt(tensor, "host")

    @contextlib.contextmanager
    def over_steps(self) -> Iterator[None]:
        """Count copies within the block."""
        self._counts = True
        yield
        self._counts = False

    def count_copy(self, size: int) -> None:
        """Count a copy on the copy stream."""
        self.copied += size if self._counts else 0

    def waited_copy(self, what: str, size: int) -> None:
        """Count a copy between device and host for which the device's own queue waits."""
        if self._counts:
            self.blocking[what] += 1
            self.blocking_bytes += size

    def is_host(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the host's memory."""
        return self._place(tensor)[1] == "host"

    def touch(self, agent: str, tensor: Tensor, *, writes: bool, what: str) -> None:
        """Record an access to a tensor."""
        if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
            return
        where, _, base = self._place(tensor)
        extent = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        self.order.access(agent, where, base, base + extent * tensor.element_size(), writes=writes, what=what)

    def enqueue(self, agent: str, *after: str) -> None:
        """Begin an operation of a stream: after what this thread has done, and after other streams."""
        for other in (self.thread, *after):
            self.order.after(agent, self.order.now(other))

    def operation(
        self,
        name: str,
        reads: list[Tensor],
        writes: list[Tensor],
        made: list[Tensor],
        *,
        on_device: bool = False,
    ) -> None:
        """Record an operation of torch.

        What is made of nothing is the device's if its device was named (`on_device`), as the host's never is;
        otherwise it belongs to whatever it is first used with.
        """
        given = [t for t in (*reads, *writes) if not t.is_meta and t.layout is torch.strided]
        changed = {id(tensor) for tensor in writes}
        places = {self._place(tensor)[1] for tensor in given if tensor.dim() or id(tensor) in changed}
        places = places or {self._place(tensor)[1] for tensor in given}
        whose = "host" if "host" in places else "device" if "device" in places else "new"
        if on_device:
            whose = "device"
        for tensor in given:
            if self._place(tensor)[1] == "new" and whose != "new":
                self._adopt(tensor, "device" if name == "aten::copy_" else whose)
                places.add(self._place(tensor)[1])
        for tensor in made:
            if not tensor.is_meta and tensor.layout is torch.strided:
                self._adopt(tensor, whose)
        both = {"host", "device"} <= places
        agent = self.thread if whose == "host" and not both else COMPUTE
        if agent == COMPUTE:
            self.enqueue(COMPUTE)
        if both:
            self.waited_copy(name, sum(tensor.nbytes for tensor in (*writes, *made)))
        awaited = [t for t in reads if agent != COMPUTE and self._place(t)[1] == "device"]  # by `on_device`
        if awaited:
            self.operation("aten::_local_scalar_dense", awaited, [], [])
        for tensor in reads:
            if agent != COMPUTE and self._place(tensor)[1] == "device":
                continue
            scalar = not tensor.dim() and self.is_host(
                tensor
            )  # the host reads it when it queues the operation
            self.touch(self.thread if scalar else agent, tensor, writes=False, what=name)
        for tensor in (*writes, *made):
            self.touch(agent, tensor, writes=True, what=name)
        if both or (name == "aten::_local_scalar_dense" and agent == COMPUTE):
            self.order.after(self.thread, self.order.now(COMPUTE))

    def _place(self, tensor: Tensor) -> tuple[object, str, int]:
        """The memory that a tensor is in, whose it is, and the byte of it where the tensor begins."""
        address = tensor.data_ptr()
        number = bisect.bisect(self._starts, address) - 1
        if number >= 0 and address < self._regions[start := self._starts[number]]:
            return ("host", start), "host", address - start
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is None:
            self._count += 1
            known = self._storages[storage._cdata] = self._count, "device"
            weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return known[0], known[1], tensor.storage_offset() * tensor.element_size()

    def _adopt(self, tensor: Tensor, whose: str) -> None:
        where, before, _ = self._place(tensor)
        if isinstance(where, int) and before != whose:
            self._storages[tensor.untyped_storage()._cdata] = where, whose
            self.order.forget(where)

    def _freed(self, storage: int, size: int) -> None:
        number, whose = self._storages.pop(storage)
        if whose == "device":  # the allocator may give it to what is computed next
            self.enqueue(COMPUTE)
        agent = self.thread if whose == "host" else COMPUTE
        if whose == "host":  # other threads have let go of it
            self.order.after(agent, self.order.users(number, "host", "thread"))
        self.order.access(agent, number, 0, size, writes=True, what="freed")
        self.order.forget(number)


class _Watching(TorchDispatchMode):
    """Records each operation of this thread."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        schema = func._schema
        name = schema.name
        if any(ret.alias_info is not None and not ret.alias_info.is_write for ret in schema.returns):
            return out  # a view
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for number, argument in enumerate(schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(t for t in tree_leaves(value) if isinstance(t, Tensor))
        given = {id(tensor) for tensor in writes}
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and id(t) not in given]
        if name.startswith(_MAKES_NO_CONTENT):
            reads = []
        on_device = not reads and not writes and kwargs.get("device") is not None
        self._recorder.operation(name, reads, writes, made, on_device=on_device)
        return out


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Record nothing on this thread within the block."""
    with torch.utils._python_dispatch._disable_current_modes():
        yield


class RecordedPoint(Point):
    """The end of something, in a recording."""

    def __init__(self, recorder: Recorder, clock: Clock):
        self.recorder = recorder
        self.clock = clock

    @property
    def reached(self) -> bool:
        order, thread = self.recorder.order, self.recorder.thread
        if self.recorder.quick:
            order.after(thread, self.clock)
        return order.knows(thread, self.clock)

    def compute_waits(self) -> None:
        self.recorder.enqueue(COMPUTE)
        self.recorder.order.after(COMPUTE, self.clock)

    def host_waits(self) -> None:
        self.recorder.order.after(self.recorder.thread, self.clock)


class RecordingStreams(Streams):
    """Copies at once, and records what a device would do."""

    apart = True

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.stream = COPY

    def copy(self, target: Tensor, source: Tensor) -> Point:
        self.before_copy()
        return self.make_copy(target, source)

    def before_copy(self) -> None:
        """Order the next copy after what was computed."""
        self.recorder.enqueue(COPY, COMPUTE)

    def make_copy(self, target: Tensor, source: Tensor) -> Point:
        """Make a copy and record it."""
        assert target.is_contiguous()
        assert source.is_contiguous()
        assert target.dtype == source.dtype
        assert self.recorder.is_host(target) != self.recorder.is_host(source), "from the one to the other"
        self.recorder.count_copy(target.nbytes)
        with muted():
            target.copy_(source)
        self.recorder.touch(self.stream, source, writes=False, what="copied")
        self.recorder.touch(self.stream, target, writes=True, what="copied to")
        return RecordedPoint(self.recorder, self.recorder.order.now(self.stream))

    def holds(self, tensor: Tensor) -> bool:
        return not self.recorder.is_host(tensor)

    def lock(self, start: int, size: int) -> Callable[[], None]:
        return self.recorder.host_memory(start, size)


class WaitingStreams(RecordingStreams):
    """Makes each copy among what is computed, and waits for it, as a device without a stream for copies."""

    apart = False

    def copy(self, target: Tensor, source: Tensor) -> Point:
        target.copy_(source)
        return RecordedPoint(self.recorder, {})
