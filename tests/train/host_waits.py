"""What makes the host wait for the device, or copy its own data there, recorded while code runs on the CPU.

On a CPU nothing is waited for, but the calls are the same ones.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import megazero

_PACKAGE = Path(megazero.__file__).parent
# Reads for whoever calls it.
_READER = _PACKAGE / "mpu/host.py"
# Operators whose result, or its shape, is a number on the host.
_READS = {
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
    "lift_fresh": "copies host data",
}
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


class _Recorders(threading.local):
    """Of this thread, innermost last."""

    def __init__(self):
        self.active: list[HostWaits] = []


_RECORDERS = _Recorders()


class HostWaits(TorchDispatchMode):
    """Within it, `found` counts (where in megazero, what) of this thread, autograd's calls included.

    Use it within `watched_methods`.
    """

    def __init__(self):
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()

    def __enter__(self):
        assert torch.Tensor.tolist is not torch._C.TensorBase.tolist, "within watched_methods"
        _RECORDERS.active.append(self)
        return super().__enter__()

    def __exit__(self, *error):
        _RECORDERS.active.pop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in _READS:
            self.add(_READS[name])
        indices = args[1] if name in _INDEXING else ()
        if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
            self.add("reads a shape")
        return func(*args, **(kwargs or {}))

    def add(self, what: str) -> None:
        """Count it for the innermost function of the package."""
        frame = sys._getframe(1)
        while frame is not None and not _counts(Path(frame.f_code.co_filename)):
            frame = frame.f_back
        where = "outside"
        if frame is not None:
            where = f"{Path(frame.f_code.co_filename).relative_to(_PACKAGE)}:{frame.f_code.co_name}"
        self.found[where, what] += 1


def _counts(path: Path) -> bool:
    return _PACKAGE in path.parents and path != _READER


@contextmanager
def watched_methods() -> Iterator[None]:
    """Methods that leave no trace among the operators, where everything is on the CPU, tell `HostWaits`."""
    methods = ("tolist", "cpu", "numpy", "__array__", "to", "cuda")
    own = {name: vars(torch.Tensor)[name] for name in methods if name in vars(torch.Tensor)}
    for name in methods:
        setattr(torch.Tensor, name, _watched(name, getattr(torch.Tensor, name)))
    try:
        yield
    finally:
        for name in methods:
            if name in own:
                setattr(torch.Tensor, name, own[name])
            else:
                delattr(torch.Tensor, name)


def _watched(name: str, method: Callable) -> Callable:
    def call(self, *args, **kwargs):
        if _RECORDERS.active:
            if name == "to":
                targets = [
                    each for each in (*args, *kwargs.values()) if isinstance(each, (str, torch.device))
                ]
                waits = bool(targets) and not kwargs.get("non_blocking")
                what = "copies between devices"
            else:
                waits, what = not kwargs.get("non_blocking"), "reads numbers"
            if waits:
                _RECORDERS.active[-1].add(what)
        return method(self, *args, **kwargs)

    return call
