"""Weights' gradients that a library of matrix products adds up: it is asked for the right product."""

from __future__ import annotations

import ctypes

import pytest
import torch

from megazero.ops.product_sum import Blas, Product, working_blas
from tests.tables import over_table

TYPES = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16}


def at(address: int, dtype: torch.dtype, rows: int, columns: int, leading: int) -> torch.Tensor:
    """The matrix [rows, columns] whose columns lie one behind the other, `leading` elements apart."""
    size = ((columns - 1) * leading + rows) * dtype.itemsize
    memory = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)
    return memory.as_strided((rows, columns), (1, leading))


def gemm_ex(*arguments) -> int:
    """cublasGemmEx as its manual defines it: ``C = alpha op(A) op(B) + beta C``, in columns, C in fp32."""
    handle, op_a, op_b, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, compute, _ = (
        arguments
    )
    assert (handle, c_type, compute) == (77, 0, 68)
    scale, before = (ctypes.c_float.from_address(number).value for number in (alpha, beta))
    left = at(a, TYPES[a_type], k, m, lda).t() if op_a else at(a, TYPES[a_type], m, k, lda)
    right = at(b, TYPES[b_type], n, k, ldb).t() if op_b else at(b, TYPES[b_type], k, n, ldb)
    total = at(c, torch.float32, m, n, ldc)
    product = scale * (left.float() @ right.float())
    total.copy_(product if before == 0.0 else product + before * total)
    return 0


BLAS = Blas(gemm_ex, lambda: 77)


def integers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, whose products and sums no rounding changes."""
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-4, 5, shape, generator=g).to(dtype)


@over_table("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@over_table(("rows", "shape", "h"), [(5, (3,), 7), (1, (1,), 1), (4, (2, 3, 2), 8), (33, (16,), 5)])
def test_a_product_begins_a_sum_and_is_added_to_it(dtype, rows, shape, h):
    n = torch.Size(shape).numel()
    left, right = integers(rows, n, dtype=dtype), integers(rows, h, dtype=dtype)
    product = Product(left, right, torch.Size((*shape, h)), BLAS)
    total = torch.full((*shape, h), torch.nan)
    exact = (left.double().t() @ right.double()).view(total.shape)
    assert torch.equal(product.value().double(), exact)
    assert product.add_to(total, begins=True)
    assert torch.equal(total.double(), exact)
    assert product.add_to(total, begins=False)
    assert torch.equal(total.double(), 2 * exact)


def test_matrices_with_strides_of_their_own():
    left, right = integers(3, 5, dtype=torch.bfloat16).t(), integers(4, 5, dtype=torch.bfloat16).t()
    total = torch.zeros(3, 4)
    assert Product(left, right, total.shape, BLAS).add_to(total, begins=False)
    assert torch.equal(total, left.float().t() @ right.float())


def test_other_sums_are_left_to_others():
    left = torch.ones(2, 3).bfloat16()
    for total in (torch.zeros(3, 3).bfloat16(), torch.zeros(3, 6)[:, ::2]):
        assert not Product(left, left, total.shape, BLAS).add_to(total, begins=True)
        assert not total.any()


def test_a_refusal_is_an_error():
    refusing = Blas(lambda *_: 15, lambda: 77)
    with pytest.raises(RuntimeError, match="returns 15"):
        refusing.add(torch.zeros(2, 2), *[torch.ones(3, 2).bfloat16()] * 2, begins=True)


def test_no_rows_begin_a_sum_of_zeros_and_add_nothing():
    """An expert without a token: cuBLAS does not promise to write a sum of no products."""
    silent = Blas(lambda *_: 0, lambda: 77)
    left, right = torch.ones(0, 3).bfloat16(), torch.ones(0, 2).bfloat16()
    total = torch.full((3, 2), torch.nan)
    assert Product(left, right, total.shape, silent).add_to(total, begins=True)
    assert torch.equal(total, torch.zeros(3, 2))
    assert Product(left, right, total.shape, silent).add_to(total.fill_(4.0), begins=False)
    assert torch.equal(total, torch.full((3, 2), 4.0))


def test_there_is_none_on_the_host():
    assert working_blas(torch.device("cpu")) is None


@pytest.mark.gpu
def test_cublas_adds_up():
    blas = working_blas(torch.device("cuda"))
    assert blas is not None
    left, right = (integers(40, n, dtype=torch.bfloat16).cuda() for n in (24, 56))
    total = torch.ones(24, 56, device="cuda")
    blas.add(total, left, right, begins=False)
    assert torch.equal(total, 1 + left.float().t() @ right.float())
