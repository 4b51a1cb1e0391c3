"""A weight's gradient, a product, added directly to an fp32 sum by cuBLAS.

torch can give such a product in fp32, but adds it to a sum of fp32 only from 2.12 on. cuBLAS has had it all
along (`cublasGemmEx`, "C = alpha A B + beta C" with A and B in 16 bits and C in fp32), and torch says which
handle is the current stream's.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

# As cublas_api.h and library_types.h number them.
_PLAIN, _TRANSPOSED = 0, 1
_FP32, _COMPUTE_FP32, _ANY_ALGORITHM = 0, 68, -1
_TYPES = MappingProxyType({torch.float16: 2, torch.bfloat16: 14})
_P, _I = ctypes.c_void_p, ctypes.c_int

GemmEx = Callable[..., int]
"""cublasGemmEx, or what does the same: it takes a handle and 18 numbers and addresses."""


@dataclass(frozen=True)
class Blas:
    """A library of matrix products.

    Attributes:
        gemm_ex: its cublasGemmEx.
        handle: the address of the handle for the current device and stream.
    """

    gemm_ex: GemmEx
    handle: Callable[[], int]

    @classmethod
    def of_torch(cls) -> Blas:
        """The cuBLAS that torch has loaded. Raises OSError if it is not there."""
        library = ctypes.CDLL(f"libcublas.so.{(torch.version.cuda or '0').split('.')[0]}")
        gemm_ex: Any = library.cublasGemmEx
        numbers = (_P, _I, _I, _P, _I, _I, _P, _P, _I, _I, _I, _I)
        gemm_ex.argtypes = (_P, _I, _I, _I, _I, _I, _P, *numbers)
        return cls(gemm_ex, torch.cuda.current_blas_handle)

    @torch.no_grad()
    def add(self, total: Tensor, left: Tensor, right: Tensor, *, begins: bool) -> None:
        """``total = left.T @ right``, or ``total +=`` that.

        Args:
            total: fp32 [n, h], contiguous.
            left: fp16 or bf16 [rows, n].
            right: [rows, h] in left's dtype.
            begins: whether `total` holds nothing yet.

        Raises:
            RuntimeError: cuBLAS refuses the call.
        """
        left, right = left.contiguous(), right.contiguous()
        (rows, n), h, kind = left.shape, right.shape[1], _TYPES[left.dtype]
        assert total.dtype == torch.float32, "sums are in fp32"
        assert total.is_contiguous(), "a sum is contiguous"
        assert total.shape == (n, h), "a sum has the product's shape"
        if not rows:  # cuBLAS may leave a sum that begins as it is
            if begins:
                total.zero_()
            return
        alpha, beta = ctypes.c_float(1.0), ctypes.c_float(0.0 if begins else 1.0)
        # cuBLAS counts down columns, for which row-major matrices are transposed: total.T = right.T @ left.
        code = self.gemm_ex(
            *(self.handle(), _PLAIN, _TRANSPOSED, h, n, rows, ctypes.addressof(alpha)),
            *(right.data_ptr(), kind, h, left.data_ptr(), kind, n, ctypes.addressof(beta)),
            *(total.data_ptr(), _FP32, h, _COMPUTE_FP32, _ANY_ALGORITHM),
        )
        if code != 0:
            raise RuntimeError(f"a weight's gradient must be added up by cuBLAS, which returns {code}.")


@dataclass(frozen=True)
class Product:
    """A weight's gradient that has not been computed yet: ``left.T @ right``, of `shape`.

    Attributes:
        left: the gradient of a linear layer's result, [rows, n].
        right: its input, [rows, h].
        shape: the weight's shape, of n h elements.
        blas: adds it to sums.
    """

    left: Tensor
    right: Tensor
    shape: torch.Size
    blas: Blas

    def value(self) -> Tensor:
        """The gradient, in the dtype of both."""
        return (self.left.t() @ self.right).view(self.shape)

    def add_to(self, total: Tensor, *, begins: bool) -> bool:
        """Add it to an fp32 sum, or begin the sum with it; return False, doing nothing, for another sum."""
        if total.dtype != torch.float32 or not total.is_contiguous():
            return False
        matrix = total.view(self.left.shape[1], self.right.shape[1])
        if self.left.dtype in _TYPES:
            self.blas.add(matrix, self.left, self.right, begins=begins)
        else:
            matrix.addmm_(self.left.t(), self.right, beta=0.0 if begins else 1.0)
        return True


def working_blas(device: torch.device) -> Blas | None:
    """torch's cuBLAS, tried on small numbers on the device; None, after a warning, if it does not add."""
    if device.type != "cuda":
        return None
    try:
        blas = Blas.of_torch()
        wrong = not _adds(blas, device)
    except (OSError, AttributeError, RuntimeError) as error:
        warnings.warn(f"Weights' gradients are added up by torch: {error}", stacklevel=2)
        return None
    if wrong:
        warnings.warn("Weights' gradients are added up by torch: cuBLAS gives another sum.", stacklevel=2)
    return None if wrong else blas


def _adds(blas: Blas, device: torch.device) -> bool:
    """Whether a library adds products of small integers exactly, which no rounding can disturb."""
    left = torch.arange(24, device=device).view(3, 8).bfloat16()
    right = torch.arange(48, device=device).view(3, 16).bfloat16()
    total = torch.full((8, 16), torch.nan, device=device)
    blas.add(total, left, right, begins=True)
    blas.add(total, left, right, begins=False)
    return torch.equal(total, 2 * (left.double().t() @ right.double()).float())
