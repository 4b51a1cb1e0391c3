"""The compiled CPU kernels, loaded at the first call on a CPU; without them, torch's operators run instead.

A kernel takes addresses. This module makes its arguments: a tensor's address, and descriptions of its rows.
"""

from __future__ import annotations

import warnings
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megazero.ops.counter_random import KeepRows, keep_threshold
from megazero.ops.dispatch import CPU, Requirements, where


class _Backend:
    """The compiled module of this process: it is imported once, and its functions are attributes of this."""

    @cached_property
    def built(self) -> bool:
        """Whether the module can be imported."""
        try:
            # Here, because it uses the OpenMP runtime that torch has loaded.
            from megazero.ops import _native
        except ImportError as error:
            warnings.warn(
                f"megazero.ops works without its compiled kernels ({error}): activations, norms and the loss "
                "are slower on CPU. Install a C++17 compiler and run `pip install -e .` to build them.",
                stacklevel=2,
            )
            return False
        vars(self).update({name: value for name, value in vars(_native).items() if name[0] != "_"})
        return True

    def __getattr__(self, name: str) -> Any:
        if name[0] != "_" and self.built and name in vars(self):
            return vars(self)[name]
        raise AttributeError(f"the compiled kernels have no `{name}`")


_BACKEND = _Backend()
if TYPE_CHECKING:
    from megazero.ops import _native

    NATIVE = _native
else:
    NATIVE = _BACKEND
NATIVE_DTYPES = frozenset({torch.float32, torch.bfloat16})
_KINDS = MappingProxyType({torch.float32: 1, torch.bfloat16: 2, torch.float16: 3})  # `ElementKind` of csrc


def available() -> bool:
    """Whether the kernels are built; tries to load them at the first call."""
    return _BACKEND.built


def on_native_cpu(dtypes: frozenset[torch.dtype] = NATIVE_DTYPES, **own: object) -> Requirements:
    """The calls that a compiled kernel handles: on CPU, in these dtypes, if built; `own` is as in `where`."""
    return where(CPU, dtypes, available, **own)


def rows_of(x: Tensor, width: int, count: int | None = None) -> NATIVE.Rows:
    """Contiguous fp32 or bf16 `x` as rows of `width` elements, to be divided among torch's threads.

    There are as many rows as fill x, unless `count` gives another number.
    """
    if count is None:
        count = x.numel() // width if width else 0
    return NATIVE.Rows(count, width, torch.get_num_threads(), x.dtype == torch.bfloat16)


def update_pass(
    param: Tensor, grad: Tensor | None, scale: float, weights: Tensor | None
) -> NATIVE.UpdatePass:
    """The tensors that a pass of an optimizer over contiguous fp32 `param` uses besides masters and moments.

    Args:
        param: the masters.
        grad: their gradient, fp32, bf16 or fp16; None if the pass reads none.
        scale: the factor of the gradient.
        weights: the tensor for the new weights, fp32, bf16 or fp16; None if they are the masters.
    """
    kinds = [0 if tensor is None else _KINDS[tensor.dtype] for tensor in (grad, weights)]
    threads = torch.get_num_threads()
    return NATIVE.UpdatePass(
        param.numel(), threads, address(grad), kinds[0], scale, address(weights), kinds[1]
    )


def address(x: Tensor | None) -> int:
    """The address of the first element; 0 for None."""
    return 0 if x is None else x.data_ptr()


def kept_by(rows: KeepRows, columns: Tensor, p: float) -> NATIVE.Keep:
    """The kernels' description of dropout; its arguments, contiguous shares of the hash, must outlive it."""
    low, odd_high = address(rows.low), address(rows.odd_high)
    return NATIVE.Keep(low, odd_high, address(columns), keep_threshold(p), 1 / (1 - p))


def adjacent(x: Tensor) -> Tensor:
    """x itself if its last dim's elements are neighbors in memory, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def heads_of(x: Tensor) -> NATIVE.HeadTensor:
    """The kernels' description of `adjacent` x [rows, samples, heads, size], which may have gaps."""
    return NATIVE.HeadTensor(x.data_ptr(), x.stride(0), x.stride(1), x.stride(2))
