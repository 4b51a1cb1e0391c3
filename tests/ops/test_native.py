"""The compiled CPU kernels: extreme values, exact rounding, strided inputs, many threads, one OpenMP runtime.

That they equal their references is swept by test_sweep.py; here is what is special to compiled code.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.kernels.build import CSRC, LibraryRecipe, build
from megazero.mpu.solo_group import SoloGroup
from megazero.ops import native, operators
from megazero.ops.bias_gelu import BIAS_GELU
from megazero.ops.cross_entropy import CROSS_ENTROPY, VocabularySlice
from megazero.ops.dispatch import CallFacts
from megazero.ops.layer_norm import LAYER_NORM
from megazero.ops.rms_norm import RMS_NORM
from megazero.ops.swiglu import SWIGLU

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled kernels are not built")

INF, NAN = float("inf"), float("nan")
ROOT = Path(__file__).resolve().parents[2]
TARGET = torch.arange(97) % 64
CALLS = {
    "bias_gelu": (BIAS_GELU, lambda f, x: f(x, None, False)),
    "bias_gelu with bias": (BIAS_GELU, lambda f, x: f(x, x.detach()[0].clone(), False)),
    "layer_norm": (LAYER_NORM, lambda f, x: f(x, x.detach()[0].clone(), x.detach()[1].clone(), 1e-5)),
    "rms_norm": (RMS_NORM, lambda f, x: f(x, x.detach()[0].clone(), 1e-5)),
    "swiglu": (SWIGLU, lambda f, x: f(x.view(-1, 2, x.shape[-1] // 2))),
    "cross_entropy": (
        CROSS_ENTROPY,
        lambda f, x: f(x, TARGET[: len(x)], VocabularySlice(SoloGroup(), 0, x.shape[-1])).loss,
    ),
}
each_call = pytest.mark.parametrize("name", CALLS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def _native(operator):
    row = operator.implementations[0]
    assert row.name == "native_cpu"
    return row.fn


def _both_ways(name: str, fn, x: Tensor, grad: Tensor | None = None) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    out = CALLS[name][1](fn, leaf)
    return out.detach(), torch.autograd.grad(out, leaf, torch.ones_like(out) if grad is None else grad)[0]


def _exponentials(x: Tensor) -> Tensor:
    """exp of fp32 x, by what the kernels include, compiled as they are."""
    source = Path(__file__).with_name("exponential.cpp")
    flags = f"-std=c++17 -O3 -ffp-contract=fast -fno-math-errno -fopenmp-simd -fPIC -I {CSRC}"
    recipe = LibraryRecipe("exponential", (source,), f"c++ {flags} -c $in -o $out", "c++ -shared $in -o $out")
    y = torch.empty_like(x)
    addresses = (ctypes.c_void_p(native.address(each)) for each in (x, y))
    ctypes.CDLL(str(build(recipe))).exponentials(*addresses, ctypes.c_int64(x.numel()))
    return y


def test_exp_is_exact_to_two_roundings() -> None:
    x = torch.linspace(-86.9, 87.9, 1_000_003)
    true = x.double().exp()
    assert ((_exponentials(x).double() - true) / true).abs().max().item() < 2e-7


def test_exp_of_extremes() -> None:
    x = torch.tensor([INF, 1e30, 89.0, 0.0, -0.0, -88.0, -1e30, -INF, NAN])
    assert torch.equal(_exponentials(x)[:-1], torch.tensor([INF, INF, INF, 1.0, 1.0, 0.0, 0.0, 0.0]))
    assert _exponentials(x)[-1].isnan()


def test_swiglu_of_extremes() -> None:
    """x / (1 + exp(-x))."""
    x = torch.tensor([INF, 1e30, 89.0, 0.0, -0.0, -89.0, -1e30, NAN])
    silu = _native(SWIGLU)(torch.stack((x, torch.ones_like(x)), 1).view(-1, 2, 1)).view(-1)
    assert torch.equal(silu[:-1], torch.tensor([INF, 1e30, 89.0, 0.0, 0.0, 0.0, 0.0]))
    assert silu[-1].isnan()


def test_bf16_rounds_to_nearest_even_and_keeps_nan() -> None:
    """An RMSNorm whose statistics are one writes its weight, so the weight can be any float."""
    patterns = torch.cat((torch.arange(-(2**31), 2**31, 65_521), torch.tensor([0x7FFFFFFF, -1, 0x7F800001])))
    weight = patterns.to(torch.int32).view(torch.float32)
    weight = torch.where((weight.abs() < 1e-37) | (weight.abs() > 1e38), torch.full((), NAN), weight)
    weight[-3:] = patterns[-3:].to(torch.int32).view(torch.float32)
    x = torch.ones(1, weight.numel(), dtype=torch.bfloat16)
    y = _native(RMS_NORM)(x, weight, 0.0)[0]
    expected = weight.bfloat16()
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y[~y.isnan()], expected[~y.isnan()])


@each_dtype
def test_gelu_far_from_zero(dtype: torch.dtype) -> None:
    """The identity on the right, zero on the left; the slope too, where its polynomial would overflow."""
    x = torch.tensor([1e4, 1e20, 3e38, -1e4, -1e20, -3e38]).to(dtype)
    y, slope = _both_ways("bias_gelu", _native(BIAS_GELU), x)
    assert torch.equal(y, torch.where(x > 0, x, 0))
    assert slope.tolist() == pytest.approx([1, 1, 1, 0, 0, 0], abs=1e-30)


@each_call
@each_dtype
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_what_is_not_finite_stays_visible(name: str, dtype: torch.dtype, bad: float) -> None:
    """Where the reference gives NaN or infinity so does the kernel, and nowhere else."""
    torch.manual_seed(0)
    x = torch.randn(5, 64).to(dtype)
    x[2, 5] = bad
    operator, _ = CALLS[name]
    ours, grad = _both_ways(name, _native(operator), x)
    true, _ = _both_ways(name, operator.reference, x)
    assert torch.equal(ours.isnan(), true.isnan())
    assert torch.equal(ours.isinf(), true.isinf())
    assert grad[[0, 1, 3, 4]].isfinite().all(), "the other rows do not see it"


@each_call
@each_dtype
def test_strided_inputs_and_gradients(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    wide = torch.randn(64, 97).to(dtype)
    fn = _native(CALLS[name][0])
    strided = wide.t()
    contiguous = strided.contiguous()
    out, _ = _both_ways(name, fn, contiguous)
    grad = torch.randn(out.shape[::-1]).to(out.dtype)
    grad = grad.permute(*reversed(range(grad.dim())))
    if name == "swiglu":
        call = lambda x: _both_ways(name, fn, x.reshape(97, 64), grad)  # noqa: E731
    else:
        call = lambda x: _both_ways(name, fn, x, grad)  # noqa: E731
    expected = _both_ways(name, fn, contiguous, grad.contiguous())
    assert all(torch.equal(ours, true) for ours, true in zip(call(strided), expected, strict=True))


@each_call
def test_threads_share_the_rows(name: str) -> None:
    """Large enough that three threads work: the same elements as of one, whoever computed them."""
    torch.manual_seed(2)
    x = torch.randn(97, 2048)
    fn = _native(CALLS[name][0])
    alone = _both_ways(name, fn, x)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = _both_ways(name, fn, x)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_parameter_gradients_of_several_threads() -> None:
    torch.manual_seed(3)
    x, grad = torch.randn(1000, 64).bfloat16(), torch.randn(1000, 64).bfloat16()
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            leaves = [torch.ones(64).requires_grad_(), torch.zeros(64).requires_grad_()]
            y = _native(LAYER_NORM)(x, *leaves, 1e-5)
            found.append(torch.autograd.grad(y, leaves, grad))
    finally:
        torch.set_num_threads(before)
    normed = F.layer_norm(x.double(), (64,))
    for grad_weight, grad_bias in found:
        assert torch.allclose(grad_weight.double(), (normed * grad.double()).sum(0), rtol=1e-5, atol=1e-3)
        assert torch.allclose(grad_bias.double(), grad.double().sum(0), rtol=1e-5, atol=1e-4)


@each_call
def test_python_threads_call_at_once(name: str) -> None:
    """As ranks that are threads of one process do; results do not mix."""
    fn = _native(CALLS[name][0])
    inputs = [torch.randn(97, 512, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    one_by_one = [_both_ways(name, fn, x) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        at_once = list(pool.map(lambda x: _both_ways(name, fn, x), inputs))
    for ours, expected in zip(at_once, one_by_one, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_bad_sizes_are_refused() -> None:
    for bad in ((-1, 1, 1), (1, -1, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="must not be negative, threads must be positive"):
            native.NATIVE.Rows(*bad, False)


def test_kernels_serve_fp32_and_bf16_on_cpu_first() -> None:
    first = {each.name: each.implementations[0] for each in operators()}
    for name in ("cross_entropy", "layer_norm", "rms_norm", "swiglu"):
        assert first[name].serves(CallFacts("cpu", torch.bfloat16))
        assert not first[name].serves(CallFacts("cpu", torch.float64))
        assert not first[name].serves(CallFacts("meta", torch.float32))


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's memory map")
def test_there_is_one_openmp_runtime() -> None:
    """The kernels use the runtime that torch has loaded; a second pool would fight it for the cores."""
    code = (
        "import torch; "
        "omp = lambda: {l.split()[-1] for l in open('/proc/self/maps') if 'omp' in l.rpartition('/')[2]}; "
        "before = omp(); from megazero.ops import native; print(native.available(), omp() == before)"
    )
    assert _run(code) == "True True"


def test_the_stub_declares_what_the_module_has() -> None:
    stub = ast.parse(Path(native.__file__).with_name("_native.pyi").read_text(encoding="utf-8"))
    declared = {node.name for node in stub.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    module = importlib.import_module("megazero.ops._native")
    assert declared == {name for name in vars(module) if not name.startswith("__")}


@pytest.mark.slow
def test_without_the_module_torch_serves_and_it_is_said() -> None:
    """None in sys.modules makes an import fail as a module that was never built does."""
    code = (
        "import sys, warnings; sys.modules['megazero.ops._native'] = None; import torch\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always'); import megazero.ops as ops\n"
        "    names = [each.choose(call).name for each in ops.operators() for call in each.calls]\n"
        "said = sum('without its compiled kernels' in str(each.message) for each in caught)\n"
        "print(len(names) > 100, [name for name in names if 'native' in name], said)"
    )
    assert _run(code) == "True [] 1"
