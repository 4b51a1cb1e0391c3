"""The rate of this machine in matrix products, in floating-point operations per second."""

from __future__ import annotations

import statistics
import time

import torch

FEW_ROWS = 32
PRODUCT_SECONDS = 0.03  # what one product may take


def measure_matmul_rate(dtype: torch.dtype, device: torch.device | str = "cpu") -> float:
    """Matmul speed of this process on `device`, FLOP/s: the yardstick for `matmul_share`.

    Times matrix products (on CPU those of a small GPT's MLP, [1024, 512] x [512, 2048]; 8192^3 on CUDA) for
    about a tenth of a second and takes the median. A product has fewer rows where a whole one would take too
    long, as in fp16 on a CPU. It uses as many threads as torch is set to, so measure on
    all ranks at once to see what each one gets of a shared machine.
    """
    device = torch.device(device)
    rows, inner, columns = (8192, 8192, 8192) if device.type == "cuda" else (1024, 512, 2048)
    left = torch.ones(rows, inner, dtype=dtype, device=device)
    right = torch.ones(inner, columns, dtype=dtype, device=device)
    left[:FEW_ROWS] @ right  # warm-up: the library picks its kernel and threads start
    affordable = FEW_ROWS * PRODUCT_SECONDS / _product_seconds(left[:FEW_ROWS], right)
    left = left[: max(FEW_ROWS, int(affordable))]
    seconds = [_product_seconds(left, right)]
    while sum(seconds) < 0.1 and len(seconds) < 100:
        seconds.append(_product_seconds(left, right))
    return 2.0 * len(left) * inner * columns / statistics.median(seconds)


def _product_seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    _synchronize(left.device)
    start = time.perf_counter()
    left @ right
    _synchronize(left.device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
