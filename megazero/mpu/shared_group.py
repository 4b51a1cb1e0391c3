"""A group over the shared memory of one host, several times as fast as Gloo's sockets (needs csrc/mpu).

Sums are taken in rank order, for bf16 and fp16 in fp32 with one rounding, so all members get the same bits
whatever the timing. A member that dies, never arrives or makes a different call is named in the others'
errors; a failure leaves the group unusable. Other devices and rare dtypes go over the underlying Gloo group.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megazero.errors import CommunicationError
from megazero.mpu.group import DONE, Group, Reduction, Transfer, Work
from megazero.mpu.torch_group import TorchGroup

_REDUCIBLE = frozenset(
    {
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)


class SharedGroup(Group):
    """A communicator of ranks on one host, made by `open_shared`.

    An asynchronous collective runs in a thread outside Python, or in the thread that waits for it if the wait
    comes first. Messages go over Gloo: in shared memory they made no pipeline faster (decision 13).

    Args:
        base: the same ranks over Gloo.
        link: this process's end of the shared memory, a `megazero.mpu._native.Link`.
    """

    def __init__(self, base: TorchGroup, link: Any):
        self.name = base.name
        self.rank = base.rank
        self.ranks = base.ranks
        self._base = base
        self._link = link
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._under_way: deque[_PendingCall] = deque()

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False) -> Work:
        if not _reducible(tensor):
            return self._base.all_reduce(tensor, op, async_op=async_op)
        what = f"all_reduce({op}) {_describe(tensor)}"
        arguments = (tensor.data_ptr(), tensor.numel(), _dtype(tensor), op)
        return self._call(self._link.all_reduce, what, arguments, (tensor,), async_op)

    def all_gather(self, output: Tensor, tensor: Tensor, *, async_op: bool = False) -> Work:
        if not _on_host(output, tensor):
            return self._base.all_gather(output, tensor, async_op=async_op)
        self._fits("all_gather", output, tensor, self.size * tensor.numel())
        arguments = (output.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        what = f"all_gather {_describe(tensor)}"
        return self._call(self._link.all_gather, what, arguments, (output, tensor), async_op)

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False
    ) -> Work:
        if not _reducible(tensor) or not _on_host(output):
            return self._base.reduce_scatter(output, tensor, op, async_op=async_op)
        self._fits("reduce_scatter", tensor, output, self.size * output.numel())
        arguments = (output.data_ptr(), tensor.data_ptr(), output.numel(), _dtype(tensor), op)
        what = f"reduce_scatter({op}) {_describe(tensor)}"
        return self._call(self._link.reduce_scatter, what, arguments, (output, tensor), async_op)

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Work:
        if not _on_host(output, tensor):
            return self._base.all_to_all(output, tensor, output_splits, input_splits, async_op=async_op)
        receives = self._split_bytes("output", output, output_splits)
        sends = self._split_bytes("input", tensor, input_splits)
        arguments = (output.data_ptr(), tensor.data_ptr(), receives, sends)
        what = f"all_to_all {tensor.dtype}"
        return self._call(self._link.all_to_all, what, arguments, (output, tensor), async_op)

    def broadcast(self, tensor: Tensor, source: int, *, async_op: bool = False) -> Work:
        if not _on_host(tensor):
            return self._base.broadcast(tensor, source, async_op=async_op)
        what = f"broadcast(from {source}) {_describe(tensor)}"
        arguments = (tensor.data_ptr(), tensor.nbytes, source)
        return self._call(self._link.broadcast, what, arguments, (tensor,), async_op)

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        return self._base.exchange(transfers)

    def barrier(self) -> None:
        self._native(f"barrier (call {next(self._numbers)})", self._link.barrier, "barrier")

    def close(self) -> None:
        """Release the shared memory and the underlying group; calls in progress on this rank fail."""
        self._link.close()
        self._base.close()

    def _call(
        self,
        start: Callable[..., Any],
        what: str,
        arguments: tuple[Any, ...],
        tensors: tuple[Tensor, ...],
        later: bool,
    ) -> Work:
        self._contiguous(what, tensors)
        if not later:
            self._native(f"{what} (call {next(self._numbers)})", start, False, what, *arguments)
            return DONE
        with self._lock:
            named = f"{what} (call {next(self._numbers)})"
            call = _PendingCall(self, named, self._native(named, start, True, what, *arguments), tensors)
            self._forget_done()
            self._under_way.append(call)
        return call

    def _forget_done(self) -> None:
        """Release the tensors of calls that have finished without anyone waiting for them."""
        done = self._link.done()
        while self._under_way and self._under_way[0].ticket <= done:
            self._under_way.popleft()

    def _native(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except RuntimeError as error:
            raise CommunicationError(
                f"`{what}` over group `{self.name}` (ranks {list(self.ranks)}, shared memory) failed on rank "
                f"{self.ranks[self.rank]}: {error}"
            ) from error

    def _contiguous(self, what: str, tensors: tuple[Tensor, ...]) -> None:
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise CommunicationError(
                    f"the tensors of `{what}` over group `{self.name}` must be contiguous, but one has "
                    f"strides {tensor.stride()}; call contiguous() on it"
                )

    def _fits(self, what: str, large: Tensor, small: Tensor, elements: int) -> None:
        if large.numel() != elements or large.dtype != small.dtype:
            raise CommunicationError(
                f"the larger tensor of `{what}` over group `{self.name}` must be {self.size} times as large "
                f"as the smaller and of its dtype, but they are {_describe(large)} and {_describe(small)}"
            )

    def _split_bytes(self, which: str, tensor: Tensor, splits: Sequence[int] | None) -> list[int]:
        rows = tensor.shape[0]
        sizes = list(splits) if splits is not None else [rows // self.size] * self.size
        if len(sizes) != self.size or sum(sizes) != rows:
            raise CommunicationError(
                f"the {which} splits of `all_to_all` over group `{self.name}` must be {self.size} counts "
                f"that add up to {rows} rows, but are {sizes}"
            )
        return [size * tensor[:1].nbytes for size in sizes]


class _PendingCall(Work):
    """A collective in progress; it keeps its tensors alive."""

    def __init__(self, group: SharedGroup, what: str, ticket: int, tensors: tuple[Tensor, ...]):
        self.group, self.what, self.ticket, self.tensors = group, what, ticket, tensors

    def wait(self) -> None:
        if self.tensors:
            self.group._native(self.what, self.group._link.wait, self.ticket)
            self.tensors = ()


def _on_host(*tensors: Tensor) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors)


def _reducible(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in _REDUCIBLE


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
