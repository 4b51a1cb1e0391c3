"""Quantizing and dequantizing by the kernels of csrc/quantize/cuda.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.kernels import DTYPE_CODES, KernelLibrary
from megazero.ops.counter_random.reference import MASK_64, mix_64
from megazero.ops.counter_random.splitmix import signed_64
from megazero.ops.cuda import CUDA_KERNELS
from megazero.ops.quantize.scheme import Quantization


def stream_start(key: int | None) -> int:
    """The start of the key's stream of random bits, as kernels take it; 0 without a key."""
    return 0 if key is None else signed_64(mix_64(key & MASK_64))


@torch.no_grad()
def quantize_cuda(
    x: Tensor,
    how: Quantization,
    key: int | None = None,
    first: int = 0,
    kernels: KernelLibrary = CUDA_KERNELS,
) -> Tensor:
    """Quantize in one pass over memory that is not in cache."""
    rows, numel = x.shape
    wide = (x if x.dtype in DTYPE_CODES else x.float()).contiguous()
    packed = x.new_empty(rows, how.row_bytes(numel), dtype=torch.uint8)
    sizes = (rows, numel, how.block, how.format.number)
    kernels.launch("quantize", wide.dtype, *sizes, key is not None, stream_start(key), first, wide, packed)
    return packed


@torch.no_grad()
def dequantize_cuda(
    packed: Tensor,
    numel: int,
    how: Quantization,
    dtype: torch.dtype,
    kernels: KernelLibrary = CUDA_KERNELS,
) -> Tensor:
    """Dequantize in one pass over memory; rows that do not lie on a multiple of 4 bytes are copied first."""
    packed = packed.contiguous()
    packed = packed.clone() if packed.data_ptr() % 4 else packed
    rows = packed.shape[0]
    x = packed.new_empty(rows, numel, dtype=dtype)
    kernels.launch("dequantize", dtype, rows, numel, how.block, how.format.number, packed, x)
    return x
