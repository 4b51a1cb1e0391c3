"""Each row of the benchmarks of a device's parts and kernels runs, small."""

from __future__ import annotations

import pytest
import torch

from benchmarks import device_parts, kernels_gpu
from benchmarks.contenders import SHAPES
from benchmarks.device_parts import WAYS, line_of
from megazero.kernels.build import build, on_cpu_recipe
from megazero.kernels.on_cpu import WatchedLibrary
from megazero.ops import operators


@pytest.fixture
def asked():
    return device_parts.Asked("cpu", tiny=True, rounds=1)


@pytest.mark.parametrize("way", WAYS["linear"])
def test_a_linear_layer_is_measured(asked, way):
    line = line_of(f"linear/124M/{way}", asked)
    bare = way.endswith("product")
    assert line.keys() - {"tflops", "share_of_nominal_rate"} == {"forward_us"} | (
        {"backward_us"} - {bare and "backward_us"}
    )
    assert line["tflops"] >= 0


@pytest.mark.parametrize("way", ["chosen", "flash", "math"])
def test_attention_is_measured(asked, way):
    assert {"forward_us", "backward_us"} <= line_of(f"attention/124M/{way}", asked).keys()


def test_a_backend_that_a_device_lacks_fails_by_name(asked):
    with pytest.raises(RuntimeError, match="No viable backend"):
        line_of("attention/124M/cudnn", asked)


@pytest.mark.parametrize(
    ("part", "way", "flops"),
    [
        # 2 micro-batches of 32 tokens, hidden 64: 2 * 64 tokens * 64 * 192.
        ("linear", "qkv bf16", 2 * 64 * 64 * 192),
        ("linear", "down fp8 product", 2 * 64 * 256 * 64),
        # 2 heads of 32, half of the scores, twice.
        ("attention", "math", 2 * 2 * 2 * 32 * 32 * 32),
    ],
)
def test_operations_are_counted(part, way, flops):
    shape = type(SHAPES["124M"])(**device_parts.TINY)
    task = device_parts.PARTS[part](shape, way)
    assert task.flops == flops
    assert isinstance(task.forward(), torch.Tensor)


@pytest.mark.parametrize("name", [name for names in kernels_gpu.KERNELS.values() for name in names])
def test_each_kernel_runs_as_it_is_timed(name):
    """A call whose arguments had moved failed on a GPU alone."""
    library = WatchedLibrary(build(on_cpu_recipe()))
    task = kernels_gpu.TaskMaker(library, "cpu", torch.bfloat16, kernels_gpu.Sizes(8, 64, 40)).task(name)
    for run in kernels_gpu.passes_of(task, task.ours).values():
        run()


@pytest.mark.fast
def test_all_kernels_are_timed_by_their_names():
    maker = kernels_gpu.TaskMaker(None, "cpu", torch.bfloat16, kernels_gpu.Sizes(8, 64, 40))
    for group, names in kernels_gpu.KERNELS.items():
        assert tuple(task.name for task in getattr(maker, group)()) == names
    known = {operator.name for operator in operators()}
    assert {name for names in kernels_gpu.KERNELS.values() for name in names} - known == {
        "adam",
        "rotary",
    } - known
