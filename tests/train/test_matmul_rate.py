from __future__ import annotations

import time

import pytest
import torch

from megazero.train.observe import host
from megazero.train.observe.host import measure_matmul_rate

PRODUCT_SECONDS = host._product_seconds


@pytest.fixture(autouse=True)
def real_products(monkeypatch):
    """Elsewhere they take no time."""
    monkeypatch.setattr(host, "_product_seconds", PRODUCT_SECONDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matmul_rate_is_that_of_a_direct_timing(dtype):
    rate = measure_matmul_rate(dtype)
    left, right = torch.ones(1024, 512, dtype=dtype), torch.ones(512, 2048, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - start)
    direct = 2 * 1024 * 512 * 2048 / best
    assert direct / 10 < rate < direct * 10  # the machine may be busy; a wrong unit is off by more


def test_slow_products_do_not_hold_up_the_start():
    """Products in fp16 ran at 1 GFLOP/s on a CPU, so four ranks took 30 seconds to measure it."""
    start = time.perf_counter()
    assert measure_matmul_rate(torch.float16) > 1e6
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(("seconds", "products"), [(0.0005, 100), (0.02, 5), (0.4, 1)])
def test_it_takes_a_tenth_of_a_second_or_a_hundred_products(monkeypatch, seconds, products):
    taken = []

    def product_seconds(left, right):
        taken.append(len(left))
        return seconds

    monkeypatch.setattr(host, "_product_seconds", product_seconds)
    rate = measure_matmul_rate(torch.float32)
    assert len(taken) == 3 + products  # the quickest of three says how many rows are affordable
    rows = {0.0005: 1024, 0.02: 48, 0.4: 32}[seconds]
    assert set(taken[3:]) == {rows}
    assert rate == 2 * rows * 512 * 2048 / seconds


def test_a_product_that_has_lost_its_core_does_not_make_a_rate_of_nothing(monkeypatch):
    """On a busy machine the first trial took 0.4 s, products had 32 rows, and bf16 ran at 0 GFLOP/s."""
    seconds = iter([0.4, 0.001, 0.002])
    monkeypatch.setattr(host, "_product_seconds", lambda left, right: next(seconds, 0.02 * len(left) / 960))
    assert measure_matmul_rate(torch.bfloat16) == pytest.approx(2 * 960 * 512 * 2048 / 0.02)
    assert [host.giga(rate) for rate in (3.2e8, 2.5e9, 1.2e11)] == ["0.32", "2.5", "120"]
