"""Checks for causes of slow training on the host: a slow precision, too many threads, other jobs."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from types import MappingProxyType

import torch

from megazero.mpu.cpu_cores import usable_cores

FEW_ROWS = 32
PRODUCT_SECONDS = 0.03  # the most that one measured product may take
_NAMES = MappingProxyType({torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"})


def measure_matmul_rate(dtype: torch.dtype, device: torch.device | str = "cpu") -> float:
    """Measure the matmul rate of this process on `device`, FLOP/s, to which `matmul_share` is relative.

    It is the median over matrix products (on a CPU those of a small GPT's MLP, [1024, 512] x [512, 2048], on
    CUDA 8192^3) for about a tenth of a second. If a whole product would take too long, as in fp16 on a CPU,
    it has fewer rows. Measure on all ranks at once to see each rank's part of a shared machine.
    """
    device = torch.device(device)
    rows, inner, columns = (8192, 8192, 8192) if device.type == "cuda" else (1024, 512, 2048)
    # Random numbers, because a GPU draws less power for constants, and runs up to a tenth faster.
    draw = torch.Generator(device).manual_seed(0)
    left = torch.randn(rows, inner, generator=draw, device=device).to(dtype)
    right = torch.randn(inner, columns, generator=draw, device=device).to(dtype)
    left[:FEW_ROWS] @ right  # warm-up: the library picks its kernel and threads start
    quickest = min(_product_seconds(left[:FEW_ROWS], right) for _ in range(3))  # others may take the core
    affordable = FEW_ROWS * PRODUCT_SECONDS / quickest
    left = left[: max(FEW_ROWS, int(affordable))]
    seconds = [_product_seconds(left, right)]
    while sum(seconds) < 0.1 and len(seconds) < 100:
        seconds.append(_product_seconds(left, right))
    return 2.0 * len(left) * inner * columns / statistics.median(seconds)


# Dense products of 16-bit numbers by the device's name, FLOP/s: half of what NVIDIA's data sheets of the
# A100, H100, H200 and B200 state for bf16 "with sparsity".
_NOMINAL = MappingProxyType(
    {
        "NVIDIA A100-SXM4-40GB": 312e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA H100 PCIe": 756.5e12,
        "NVIDIA H100 80GB HBM3": 989.5e12,
        "NVIDIA H200": 989.5e12,
        "NVIDIA B200": 2250e12,
    }
)


def nominal_matmul_rate(device_name: str) -> float | None:
    """The vendor's rate of dense 16-bit products, FLOP/s, to which MFU is relative; None if unknown."""
    return _NOMINAL.get(device_name)


def rate_remark(dtype: torch.dtype, rate: float, device_name: str) -> str:
    """A remark with a GPU's measured matmul rate, FLOP/s, and its nominal rate if known."""
    line = f"products in {_NAMES[dtype]} run at {rate / 1e12:.0f} TFLOP/s on this {device_name}"
    nominal = None if dtype == torch.float32 else nominal_matmul_rate(device_name)
    if nominal is None:
        return line
    return f"{line}, {rate / nominal:.0%} of the nominal {nominal / 1e12:g}; `matmul_share` is of the former"


def _product_seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    _synchronize(left.device)
    start = time.perf_counter()
    left @ right
    _synchronize(left.device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


SLOWER = 0.8
"""Below this fraction of fp32's rate, a 16-bit precision costs more time than its smaller tensors save."""
BUSY = 0.5
"""The fraction of the cores that other processes may use without a remark."""


def giga(rate: float) -> str:
    """Format a rate in units of 1e9, below ten with two digits, so that no rate is shown as 0."""
    return f"{rate / 1e9:.0f}" if rate >= 1e10 else f"{rate / 1e9:.2g}"


def precision_remark(dtype: torch.dtype, rate: float, rate_in_fp32: float) -> str | None:
    """A remark if products in `dtype` are much slower than in fp32, else None; rates in FLOP/s."""
    if rate >= SLOWER * rate_in_fp32:
        return None
    name = _NAMES[dtype]
    return (
        f"warning: products in {name} run at {rate / rate_in_fp32:.2f} of fp32's rate on this CPU "
        f"({giga(rate)} and {giga(rate_in_fp32)} GFLOP/s); training is faster without --{name}"
    )


def ranks_here() -> int:
    """The number of processes of this job on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def crowding_remarks(ranks: int, threads: int, cores: int, others: int | None) -> Iterator[str]:
    """Yield remarks about shared cores.

    Args:
        ranks: processes of this job on this host.
        threads: threads of each process.
        cores: cores that they may use.
        others: runnable tasks of other jobs when this one began; None if unknown.
    """
    if ranks * threads > max(cores, ranks):
        yield (
            f"warning: {ranks} ranks with {threads} threads each share {cores} cores; set OMP_NUM_THREADS to "
            f"{max(1, cores // ranks)}"
        )
    elif ranks > cores:
        yield f"warning: {ranks} ranks share {cores} cores, so they take turns; start at most {cores}"
    if others is not None and others > BUSY * cores:
        yield (
            f"warning: other processes keep this machine busy ({others} run on {cores} cores); "
            "times are longer than on a quiet one"
        )


def host_remarks(dtype: torch.dtype, rate: float, device: torch.device, others: int | None) -> list[str]:
    """All remarks about this process's host; `rate` is that of `measure_matmul_rate` for `dtype`."""
    if device.type == "cuda":
        return [rate_remark(dtype, rate, torch.cuda.get_device_name(device))]
    if device.type != "cpu":
        return []
    slow = None
    if dtype != torch.float32:
        slow = precision_remark(dtype, rate, measure_matmul_rate(torch.float32, device))
    crowded = crowding_remarks(ranks_here(), torch.get_num_threads(), usable_cores(), others)
    return [*filter(None, [slow]), *crowded]
