"""A shared library of kernels, called with tensors and numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

_Made = TypeVar("_Made")

# As csrc/common/cuda.hpp numbers them.
DTYPE_CODES = MappingProxyType({torch.float32: 0, torch.float16: 1, torch.bfloat16: 2})
_C_TYPES = MappingProxyType({"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double})

# On the CPU, the most groups of rows that are summed separately; a multiple of the rows that share a block
# (csrc/common/cuda_rows.hpp).
MOST_GROUPS = 8
_MOST_SIZES = 4096  # cached answers about workspaces

# An argument of a launch; `KernelLibrary.launch` says what the kernel gets for it.
Argument = Tensor | torch.dtype | float | None | Sequence[Tensor | None] | Sequence[int] | Sequence[float]


class KernelLibrary:
    """The functions `megazero_cuda_<name>` of a shared library.

    A function takes addresses, integers and doubles, and a stream last. The library states each function's
    signature, so ctypes refuses a call with the wrong number or kind of arguments.

    Attributes:
        path: the library's file; its name holds a hash of the sources, and the architectures.
    """

    def __init__(self, path: Path) -> None:
        """Load the library at `path`. Raises OSError if it cannot be loaded."""
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.megazero_cuda_error_text.restype = ctypes.c_char_p
        self._functions: dict[str, object] = {}
        self._sizes: dict[tuple[object, ...], int] = {}
        self._made: dict[object, Any] = {}

    def driver_error(self) -> str | None:
        """CUDA's message if this machine's driver cannot run the library; None if it can."""
        code = self._library.megazero_cuda_driver_error()
        return None if code == 0 else self._error_text(code)

    def launch(self, name: str, *arguments: Argument) -> None:
        """Run kernel `name` on the current stream of the device that its tensors are on.

        A contiguous tensor is passed as its address, None as address 0, a dtype as its code, an int or a
        float as it is, and a sequence of tensors and None, of ints or of floats as an array in host memory.

        Raises:
            RuntimeError: CUDA refuses the launch.
            ValueError: a tensor is not contiguous, or the tensors are not all on one device.
            ctypes.ArgumentError, TypeError: the function does not take these arguments.
        """
        function = self._functions.get(name) or self._function(name)
        devices: set[int] = set()
        values: list[object] = []
        for argument in arguments:
            kind = type(argument)
            if kind in _AS_THEY_ARE:
                values.append(argument)
            elif type(argument) is Tensor and argument.is_contiguous():  # half of them: no time for a call
                devices.add(argument.get_device())
                values.append(argument.data_ptr())
            else:
                values.append(_CONVERTED.get(kind, _other)(argument, devices))
        if len(devices) != 1:
            raise ValueError(f"the kernel `{name}` must get tensors of one device, but they are on {devices}")
        code = self._start(function, values, *devices)
        if code != 0:
            text = self._error_text(code)
            raise RuntimeError(f"the kernel `{name}` must start, but CUDA says: {text} ({code}).")

    def once(self, key: object, make: Callable[[], _Made]) -> _Made:
        """Return `make()`, called once per key: buffers and tables that launches of this library share."""
        if key not in self._made:
            self._made[key] = make()
        made: _Made = self._made[key]
        return made

    def column_groups(self, count: int, width: int) -> int:
        """The number of row groups in the fp32 workspace [groups, width] for summing `count` rows."""
        return self._size("column_groups", count, width)

    def column_counters(self, groups: int, width: int) -> int:
        """The number of int32 counters by which the last of `groups` groups is known, which adds up all sums.

        Forward clears the counters, and backward leaves them clear.
        """
        return self._size("column_counters", groups, width)

    def _size(self, name: str, *sizes: int) -> int:
        key = (name, *sizes)
        if len(self._sizes) > _MOST_SIZES:  # experts, for one, have another number of rows in each call
            self._sizes.clear()
        if key not in self._sizes:
            self._sizes[key] = self._function(name)(*sizes)
        return self._sizes[key]

    def _start(self, function: Any, values: list[Any], device: int) -> int:
        """Call the function on a device's current stream; returns CUDA's code."""
        if device == torch.cuda.current_device():
            code: int = function(*values, current_stream(device))
            return code
        with torch.cuda.device(device):
            return self._start(function, values, device)

    def _error_text(self, code: int) -> str:
        text: bytes = self._library.megazero_cuda_error_text(code)
        return text.decode()

    def _function(self, name: str) -> Any:
        function = getattr(self._library, f"megazero_cuda_{name}")
        signature = getattr(self._library, f"megazero_cuda_{name}_signature")
        signature.restype = ctypes.c_char_p
        function.argtypes = [_C_TYPES[letter] for letter in signature().decode()]
        return self._functions.setdefault(name, function)


class LaunchWatch(TorchDispatchMode):
    """A dispatch mode that also sees the launches of `StillKernels`."""

    def launched(self, name: str, arguments: Sequence[Argument]) -> None:
        """Record a launch on this thread, with the arguments of `KernelLibrary.launch`."""
        raise NotImplementedError


class StillKernels(KernelLibrary):
    """Kernels of a device that a plan imitates: nothing runs, but a `LaunchWatch` sees each launch."""

    def __init__(self) -> None:
        """Load nothing."""
        self._made = {}

    def launch(self, name: str, *arguments: Argument) -> None:
        """Report the launch to every `LaunchWatch` on this thread."""
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, LaunchWatch):
                mode.launched(name, arguments)

    def column_groups(self, count: int, width: int) -> int:
        """As many as a small device takes."""
        return MOST_GROUPS

    def column_counters(self, groups: int, width: int) -> int:
        """One, because a plan need not count a few bytes."""
        return 1


def current_stream(device: int) -> int:
    """The address of a device's current stream; to make a `Stream` object would take microseconds."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream


def tensors_among(arguments: Sequence[Argument]) -> Iterator[Tensor]:
    """The tensors among a launch's arguments, including those in sequences."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from tensors_among(argument)


def _address(tensor: Tensor, devices: set[int]) -> int:
    """Return a tensor's address, and add its device's number, -1 for the CPU, to `devices`."""
    if not tensor.is_contiguous():
        raise ValueError(f"kernels must get contiguous tensors, but one has the strides {tensor.stride()}")
    devices.add(tensor.get_device())
    return tensor.data_ptr()


def _array(members: Sequence[Any], devices: set[int]) -> ctypes.Array[Any]:
    values = [x or 0 if type(x) in _AS_THEY_ARE else _address(x, devices) for x in members]
    element = ctypes.c_double if float in set(map(type, values)) else ctypes.c_int64
    return (element * len(values))(*values)


def _code(dtype: torch.dtype, devices: set[int]) -> int:
    return DTYPE_CODES[dtype]


def _other(argument: Any, devices: set[int]) -> Any:
    """Convert an argument of a rare type, such as a subclass of Tensor."""
    if isinstance(argument, Tensor):
        return _address(argument, devices)
    return argument if isinstance(argument, (int, float)) else _array(argument, devices)


# A launch has ten arguments and more, and one look-up by type is faster than a chain of isinstance.
_AS_THEY_ARE = frozenset({type(None), int, float, bool})
_CONVERTED: MappingProxyType[type, Callable[[Any, set[int]], Any]] = MappingProxyType(
    {Tensor: _address, nn.Parameter: _address, torch.dtype: _code, list: _array, tuple: _array}
)
