"""Products with codes by AVX-512 and VNNI have the bits of those by AVX2, on any x86 processor."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megazero.ops import native
from megazero.ops.coded_linear import coded_linear_native_cpu
from tests.ops.test_coded_linear import ROWS, compiled, drawn, weight_of

pytestmark = [pytest.mark.slow, compiled]  # compiling takes most of the time

SOURCE = Path(__file__).parent / "imitated_avx512.cpp"
CSRC = Path(__file__).parents[2] / "csrc"


@pytest.fixture(scope="module")
def imitation(tmp_path_factory) -> ctypes.CDLL:
    """The library with both paths."""
    compiler = shutil.which("g++")
    if compiler is None or native.NATIVE.coded_path().value < native.NATIVE.CodedPath.AVX2.value:
        pytest.skip("needs g++ and AVX2")
    library = tmp_path_factory.mktemp("imitated") / "imitated.so"
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-Wno-psabi", f"-I{CSRC}"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def sizes(*numbers: int) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(number) for number in numbers]


@pytest.mark.parametrize("shape", [(37, 32, 1, 8), (130, 384, 3, 4), (65, 1024, 8, 8)], ids=str)
def test_codes_by_64_bytes_have_the_same_bits(imitation, shape):
    width, depth, groups, bits = shape
    weight, bias = weight_of(*shape), drawn(width)
    for rows in ROWS:
        x, y = drawn(rows, depth), torch.zeros(rows, width)
        expected = coded_linear_native_cpu(x, weight, bias, None, native.NATIVE.CodedPath.AVX2)
        tensors = (x, weight.words, weight.scales, bias, y)
        imitation.imitated_coded(*sizes(rows, width, depth, depth // groups, bits), *map(at, tensors))
        assert torch.equal(y, expected)


@pytest.mark.parametrize("shape", [(37, 32), (48, 516), (16, 4096)], ids=str)
def test_integers_by_vnni_are_exact(imitation, shape):
    width, depth = shape
    weight, bias = weight_of(width, depth, 1, 8, rounds_inputs=True), drawn(width)
    extreme = weight_of(width, depth, 1, 8, rounds_inputs=True)
    extreme.words.fill_(-2139062144)  # 0x80808080: all codes are -128
    for own in (weight, extreme):
        for rows in ROWS:
            x, y = drawn(rows, depth), torch.zeros(rows, width)
            x[0] = -x[0].abs().max()  # all inputs are -128, too
            expected = coded_linear_native_cpu(x, own, bias, None, native.NATIVE.CodedPath.BASELINE)
            tensors = (x, own.words, own.scales, bias, y)
            imitation.imitated_integers(*sizes(rows, width, depth), *map(at, tensors))
            assert torch.equal(y, expected)
