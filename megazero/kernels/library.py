"""A shared library of kernels, called with tensors and numbers."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

# As csrc/common/cuda.hpp numbers them.
DTYPE_CODES = MappingProxyType({torch.float32: 0, torch.float16: 1, torch.bfloat16: 2})
_C_TYPES = MappingProxyType({"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double})

# The most groups of rows with sums of their own where kernels run on the CPU; a multiple of the rows that
# share a block (csrc/common/cuda_rows.hpp).
MOST_GROUPS = 8

# An argument of a launch; `KernelLibrary.launch` says what the kernel gets.
Argument = Tensor | torch.dtype | float | None | Sequence[Tensor | None] | Sequence[int] | Sequence[float]


class KernelLibrary:
    """The functions `megazero_cuda_<name>` of a shared library.

    A function's parameters are addresses, integers and doubles, and a stream last. The library says which for
    each function, so a call with the wrong number or kind of arguments is an error of Python's.

    Attributes:
        path: the library's file, whose name says what it was built from and for.
    """

    def __init__(self, path: Path) -> None:
        """Load the library at `path`. Raises OSError if it cannot be loaded."""
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.megazero_cuda_error_text.restype = ctypes.c_char_p

    def driver_error(self) -> str | None:
        """The reason, in CUDA's words, why this machine's driver cannot run the library; None if it can."""
        code = self._library.megazero_cuda_driver_error()
        return None if code == 0 else self._error_text(code)

    def launch(self, name: str, *arguments: Argument) -> None:
        """Run kernel `name` on the current stream of the device that its tensors are on.

        An argument is a tensor (its address is passed; it must be contiguous), None (address 0), a dtype (its
        code), an int or a float; or a sequence of tensors and None, of ints or of floats: an array of them in
        host memory. Raises RuntimeError if CUDA refuses the launch, and ctypes.ArgumentError or TypeError for
        arguments that the function does not take.
        """
        tensors = list(tensors_among(arguments))
        assert all(tensor.is_contiguous() for tensor in tensors), f"{name} takes contiguous tensors"
        assert len({tensor.device for tensor in tensors}) == 1, f"{name} takes tensors of one device"
        with self._on(tensors) as stream:
            code = self._function(name)(*map(_as_c, arguments), stream)
        if code != 0:
            text = self._error_text(code)
            raise RuntimeError(f"the kernel `{name}` must start, but CUDA says: {text} ({code}).")

    def column_groups(self, count: int, width: int) -> int:
        """The number of groups in the fp32 workspace [groups, width] in which kernels sum `count` rows."""
        groups: int = self._function("column_groups")(count, width)
        return groups

    def _on(self, tensors: list[Tensor]) -> contextlib.AbstractContextManager[int]:
        """A context in which the tensors' device is current, and which yields the stream to launch on."""
        return _device_and_stream(tensors[0].device)

    def _error_text(self, code: int) -> str:
        text: bytes = self._library.megazero_cuda_error_text(code)
        return text.decode()

    def _function(self, name: str) -> Any:
        function = getattr(self._library, f"megazero_cuda_{name}")
        if function.argtypes is None:
            signature = getattr(self._library, f"megazero_cuda_{name}_signature")
            signature.restype = ctypes.c_char_p
            function.argtypes = [_C_TYPES[letter] for letter in signature().decode()]
        return function


@contextlib.contextmanager
def _device_and_stream(device: torch.device) -> Iterator[int]:
    with torch.cuda.device(device):
        yield torch.cuda.current_stream(device).cuda_stream


def tensors_among(arguments: Sequence[Argument]) -> Iterator[Tensor]:
    """The tensors among a launch's arguments, including those in sequences."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from tensors_among(argument)


def _as_c(argument: Argument) -> Any:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if isinstance(argument, torch.dtype):
        return DTYPE_CODES[argument]
    if isinstance(argument, (list, tuple)):
        values = [_as_c(member) or 0 for member in argument]
        element = ctypes.c_double if any(isinstance(member, float) for member in argument) else ctypes.c_int64
        return (element * len(values))(*values)
    return argument
