"""`Streams`: copies between a device and the host that run while the device computes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Point(Protocol):
    """The end of a copy."""

    @property
    def reached(self) -> bool:
        """Whether the copy has been made."""

    def compute_waits(self) -> None:
        """Make all computation that is queued from now on wait for this point; the host does not wait."""

    def host_waits(self) -> None:
        """Return when the copy has been made."""


class Reached(Point):
    """The end of a copy that has been made."""

    reached = True

    def compute_waits(self) -> None:
        return None

    def host_waits(self) -> None:
        return None


REACHED = Reached()


class Streams(Protocol):
    """The queues of a device: one of what it computes, and one of copies between it and the host.

    Attributes:
        apart: whether device and host memory are apart, so that copies must be waited for.
    """

    apart: bool

    def copy(self, target: Tensor, source: Tensor) -> Point:
        """Queue a copy, after all that the device has been asked to compute, and all earlier copies.

        Until a caller has waited for the returned point, nothing may write to `source`, read or write
        `target`, or free either of them. Both are contiguous and of one dtype. If the host tensor is not in
        locked memory, the host waits for the copy here.
        """

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor is on a device whose memory is apart from the host's."""

    def aside(self) -> Streams:
        """Further streams, whose copies run after the copies queued here; these do not wait for them."""
        return self

    def lock(self, start: int, size: int) -> Callable[[], None] | None:
        """Lock whole pages of host memory, so that the device can copy from and to them by itself.

        Args:
            start: the address.
            size: bytes.

        Returns:
            A function that waits for all copies and unlocks the pages; None if nothing was locked, in which
            case copies there are slower and the host waits for each.
        """
        return None


class InlineStreams(Streams):
    """Copies by the host itself, at once: for a CPU, whose memory is the host's."""

    apart = False

    def copy(self, target: Tensor, source: Tensor) -> Point:
        target.copy_(source)
        return REACHED

    def holds(self, tensor: Tensor) -> bool:
        return False


INLINE = InlineStreams()


class StillStreams(Streams):
    """Streams of a device that a plan is about: nothing is copied, but all buffers are allocated."""

    apart = True

    def copy(self, target: Tensor, source: Tensor) -> Point:
        return REACHED

    def holds(self, tensor: Tensor) -> bool:
        return True


STILL = StillStreams()


class CudaStreams(Streams):
    """Streams of a CUDA device: its current one computes, another one copies; events order the two.

    Args:
        device: the device.
        before: streams whose copies come first.
    """

    apart = True

    def __init__(self, device: torch.device, before: CudaStreams | None = None):
        self._device = device
        self._before = before
        self._stream: torch.cuda.Stream | None = None  # made when it is used, as this makes a CUDA context

    def copy(self, target: Tensor, source: Tensor) -> Point:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if self._before is not None and self._before._stream is not None:
            self._stream.wait_stream(self._before._stream)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return _Event(self._stream.record_event(), self._device)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def aside(self) -> CudaStreams:
        return CudaStreams(self._device, self)

    def lock(self, start: int, size: int) -> Callable[[], None] | None:
        cudart = torch.cuda.cudart()
        code = cudart.cudaHostRegister(start, size, 0)
        if code == cudart.cudaError.success:
            return lambda: self._unlock(start)
        warnings.warn(
            f"{size / 2**20:.1f} MiB of the host's memory must be locked for copies beside what the device "
            f"computes, but: CUDA says {code}; these copies hold up the host; free some memory there",
            stacklevel=2,
        )
        with contextlib.suppress(RuntimeError):  # torch would raise the error at the next kernel's launch
            torch.zeros(1, device=self._device).add_(1)
        return None

    def _unlock(self, start: int) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        torch.cuda.cudart().cudaHostUnregister(start)


class _Event(Point):
    def __init__(self, event: torch.cuda.Event, device: torch.device):
        self._event = event
        self._device = device

    @property
    def reached(self) -> bool:
        return bool(self._event.query())

    def compute_waits(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def host_waits(self) -> None:
        self._event.synchronize()


def streams_of(device: torch.device) -> Streams:
    """The streams of a rank's device."""
    return CudaStreams(device) if device.type == "cuda" else INLINE
