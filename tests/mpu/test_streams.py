"""Copies beside what a device computes, and the memory on the host that they use."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megazero.mpu import streams as module
from megazero.mpu.context import solo_context
from megazero.mpu.slab import Slab
from megazero.mpu.streams import INLINE, CudaStreams, InlineStreams, Point, streams_of
from tests.tables import over_table

PAGE = mmap.PAGESIZE


class Locked(InlineStreams):
    """Knows what is locked: bytes by address."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def copy(self, target: Tensor, source: Tensor) -> Point:
        raise AssertionError("nothing is copied here")

    def lock(self, start: int, size: int) -> Callable[[], None]:
        self.locked[start] = size
        return lambda: self._unlock(start)

    def _unlock(self, start: int) -> None:
        del self.locked[start]


@over_table(("size", "pages"), [(0, 1), (1, 1), (PAGE, 1), (PAGE + 1, 2), (5 * PAGE, 5), (1025 * PAGE, 1025)])
def test_memory_is_whole_pages_and_no_power_of_two(size, pages):
    streams = Locked()
    memory = Slab(streams).take(size)
    assert (memory.dtype, memory.shape) == (torch.uint8, (size,))
    assert not memory.any()
    assert list(streams.locked.values()) == [pages * PAGE]
    if size:
        assert memory.data_ptr() in streams.locked
        assert memory.data_ptr() % PAGE == 0


def test_memory_is_unlocked_when_the_last_part_of_it_is_let_go_of():
    streams = Locked()
    slab = Slab(streams)
    one, other = slab.take(PAGE), slab.take(PAGE - 320)
    part = one[8:].view(torch.float32)
    del one
    assert len(streams.locked) == 2
    part.fill_(1)
    del part
    assert streams.locked == {other.data_ptr() - 320: PAGE}


def test_pieces_begin_at_different_lines_of_a_page():
    """An update reads several of equal size at a time, whose lines would push one another out of a cache."""
    slab = Slab(Locked())
    pieces = [slab.take(4 * PAGE) for _ in range(64)]
    offsets = [piece.data_ptr() % PAGE for piece in pieces]
    assert offsets[:4] == [0, 320, 640, 960]
    assert sorted(offsets) == list(range(0, PAGE, 64))
    assert Slab().take(100).data_ptr() % 64 == 0


def test_on_a_cpu_copies_are_made_at_once():
    assert solo_context().streams is INLINE is streams_of(torch.device("meta"))
    assert not INLINE.apart
    target = torch.zeros(3)
    point = INLINE.copy(target, torch.ones(3))
    assert point.reached
    assert target.tolist() == [1.0] * 3


def test_memory_that_cannot_be_locked_is_used_with_a_word(monkeypatch):
    class Cudart:
        class cudaError:
            success = 0

        def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
            return 2

        def cudaHostUnregister(self, start: int) -> None:
            raise AssertionError("it was not locked")

    launched = []
    zeros = torch.zeros
    monkeypatch.setattr(module.torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(module.torch, "zeros", lambda *a, **k: (launched.append(1), zeros(*a))[1])
    with pytest.warns(UserWarning, match=r"must be locked .*, but: CUDA says 2; .* hold up the host"):
        memory = Slab(CudaStreams(torch.device("cpu"))).take(PAGE)
    assert launched, "torch would raise the error at the next kernel"
    memory.fill_(1)


def test_copies_aside_come_after_earlier_copies_and_later_ones_do_not_wait(monkeypatch):
    """A save's copies and those of offloaded state shared a stream, so the next step waited for the save."""

    class Stream:
        def __init__(self, name: object):
            self.name, self.waits = str(name), []

        def wait_stream(self, other: Stream) -> None:
            self.waits.append(other.name)

        def record_event(self) -> None:
            return None

    cuda, made, current = module.torch.cuda, [], Stream("compute")
    monkeypatch.setattr(cuda, "Stream", lambda device: made.append(Stream(len(made))) or made[-1])
    monkeypatch.setattr(cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(cuda, "stream", lambda stream: contextlib.nullcontext())
    streams, tensor = CudaStreams(torch.device("cpu")), torch.zeros(1)
    aside = streams.aside()
    for queue in (streams, aside, streams):
        queue.copy(tensor, tensor)
    assert [stream.waits for stream in made] == [["compute", "compute"], ["compute", "0"]]


@pytest.mark.gpu
def test_cuda_copies_both_ways_from_memory_that_is_locked():
    device = torch.device("cuda", torch.cuda.current_device())
    streams = streams_of(device)
    memory = Slab(streams).take(1 << 24)
    assert memory.is_pinned()
    x = torch.zeros(1 << 22, device=device)
    for _ in range(50):
        x = x + 1  # still queued when the copy is
    point = streams.copy(memory.view(torch.float32), x)
    point.host_waits()
    assert set(memory.view(torch.float32).tolist()) == {50.0}
    back = torch.empty_like(x)
    point = streams.copy(back, memory.view(torch.float32))
    point.compute_waits()
    assert back.sum().item() == 50.0 * (1 << 22)
    start = memory.data_ptr()
    del memory
    assert torch.cuda.cudart().cudaHostUnregister(start) != torch.cuda.cudart().cudaError.success
