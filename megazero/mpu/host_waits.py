"""Finds the calls that make the host wait for the device, or copy its own data there, while code runs.

On a CPU nothing is waited for, but the calls are the same ones, so a mode that sees every operator and every
method of tensors finds them there. On CUDA torch itself tells them (`torch.cuda.set_sync_debug_mode`).
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.errors import HostWaitError
from megazero.host_memory import STAGED_COPY_BYTES

_PACKAGE = Path(__file__).parents[1]
# They read, and send, for whoever calls them.
_DOORS = (_PACKAGE / "mpu/host.py", _PACKAGE / "host_memory.py")
# What a step may wait for: what `read_values` reads for the step, and, on a CPU, groups that move data there.
_ALLOWED = ("mpu/",)
# Looks again in fp64 where fp32 overflows; takes another way on a GPU.
_CPU_ONLY = "ops/square_sum.py:_in_blocks"
_COPY = "copies host data"
_PAGEABLE = "copies memory that is not locked"
# Operators whose result, or its shape, is a number on the host.
_READS = MappingProxyType(
    {
        "_local_scalar_dense": "reads a number",
        "nonzero": "reads a shape",
        "masked_select": "reads a shape",
        "_unique2": "reads a shape",
        "unique_dim": "reads a shape",
        "unique_consecutive": "reads a shape",
        "repeat_interleave": "reads a shape",
        "equal": "reads a number",
        "allclose": "reads a number",
        # torch.tensor and its kin, of numbers or arrays
        "lift_fresh": _COPY,
    }
)
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
# Methods that leave no trace among the operators where everything is on the CPU.
_METHODS = ("tolist", "cpu", "numpy", "__array__", "to", "cuda")


class HostWaits(TorchDispatchMode):
    """A mode that counts the waits of this thread, autograd included, in `found` by (place, kind).

    Args:
        refuses: whether what a step may not do is an error at once.
    """

    def __init__(self, refuses: bool = False):
        TorchDispatchMode.__init__(self)
        self.refuses = refuses
        self.found: Counter[tuple[str, str]] = Counter()
        self.unexpected: Counter[tuple[str, str]] = Counter()
        self._methods = _Methods(self)

    def __enter__(self) -> HostWaits:
        TorchFunctionMode.__enter__(self._methods)
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *error: object) -> None:
        TorchDispatchMode.__exit__(self, *error)
        TorchFunctionMode.__exit__(self._methods, *error)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        name = func.overloadpacket.__name__
        if name in _READS:
            self.add(_READS[name])
        indices = args[1] if name in _INDEXING else ()
        if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
            self.add("reads a shape")
        return func(*args, **(kwargs or {}))

    def add(self, what: str) -> None:
        """Count it for the innermost function of the package.

        Raises:
            HostWaitError: the call is not one of those that a step may make, and this object refuses them.
        """
        frame: FrameType | None = sys._getframe(1)
        reads = False
        while frame is not None and not _counts(Path(frame.f_code.co_filename)):
            reads |= Path(frame.f_code.co_filename) in _DOORS
            frame = frame.f_back
        where = "outside" if frame is None else _place(frame)
        if reads and what == _PAGEABLE:
            return  # it is locked on CUDA
        self.found[where, what] += 1
        if reads or what == _COPY or where == _CPU_ONLY or where.startswith(_ALLOWED):
            return
        where = where if frame is None else f"{where}, line {frame.f_lineno}"
        self.unexpected[where, what] += 1
        if self.refuses:
            raise HostWaitError(_sentence(where, what))


class _Methods(TorchFunctionMode):
    def __init__(self, waits: HostWaits):
        super().__init__()
        self._waits = waits

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _METHODS:
            if kwargs.get("non_blocking"):
                if args[0].nbytes > STAGED_COPY_BYTES and not (args[0].is_cuda or args[0].is_pinned()):
                    self._waits.add(_PAGEABLE)
            elif name != "to":
                self._waits.add("reads numbers")
            elif any(isinstance(value, (str, torch.device)) for value in (*args[1:], *kwargs.values())):
                self._waits.add("copies between devices")
        if func is torch.Tensor.backward:
            with self:  # a mode is off in what it calls, and backward calls hooks and custom functions
                return _backward(*args, **kwargs)
        return func(*args, **kwargs)


def _backward(
    tensor: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[torch.Tensor] | None = None,
) -> None:
    """Do as `torch.Tensor.backward` does. Given a tensor, torch would ask the mode again."""
    torch.autograd.backward(
        [get_gradient_edge(tensor)], [gradient], retain_graph, create_graph, inputs=inputs
    )


def _counts(path: Path) -> bool:
    return _PACKAGE in path.parents and path not in (*_DOORS, Path(__file__))


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).relative_to(_PACKAGE)}:{frame.f_code.co_name}"


def _sentence(where: str, what: str) -> str:
    return (
        f"a step must read from the device by `read_values` alone, but {where} {what}; keep the value on "
        "the device, or set --check-host-waits warn to see all such calls"
    )


@contextmanager
def host_waits(device: torch.device, *, refuses: bool) -> Iterator[Counter[tuple[str, str]]]:
    """Count, within the block, the calls that make the host wait for `device`: (where, what).

    `read_values` and `on_device` may wait; on a CPU, groups may too. On CUDA the place is a file and a line.

    Raises:
        HostWaitError: there is such a call, and this `refuses` them.
    """
    counts: Counter[tuple[str, str]] = Counter()
    if device.type != "cuda":
        with HostWaits(refuses) as waits:
            yield counts
        counts.update(waits.unexpected)
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # As an error it would name no place: a traceback may end within autograd.
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counts
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        if "synchronizing CUDA operation" in str(warning.message):
            counts[f"{warning.filename}, line {warning.lineno}", "waits for the device"] += 1
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if counts and refuses:
        raise HostWaitError(_sentence(*next(iter(counts))))
