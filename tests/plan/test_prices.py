"""Prices: kernels and calls against published figures and laws."""

from __future__ import annotations

import math

import pytest
import torch

from megazero.account.profilers.calls import CollectiveCall
from megazero.errors import ConfigError
from megazero.plan.device import Device, known_devices
from megazero.plan.operators import visible_pairs
from megazero.plan.prices import Prices, interpolated
from megazero.plan.work import Kernel

A100, H100, H200, B200 = (Device.load(name) for name in ("a100-80g", "h100", "h200", "b200"))
MIB, GIB = 2**20, 2**30


def full(device: Device) -> Prices:
    """The prices at which the device's rates are reached in full."""
    return Prices(device, efficiency=1)


def matmul(m: int, n: int, k: int, batch: int = 1, dtype=torch.bfloat16) -> Kernel:
    nbytes = 2 * batch * (m * k + k * n + m * n)
    return Kernel("mm", nbytes, 2 * m * n * k * batch, dtype, (m, n, k), batch)


def call(operation: str, nbytes: int, *ranks: int) -> CollectiveCall:
    return CollectiveCall("g", operation, nbytes, ranks)


def rate(device: Device, *sizes: int) -> float:
    return Prices(device).matmul_flop_per_s("bfloat16", *sizes) / 1e12


def test_measured_products_are_what_was_measured():
    for device in (A100, H100, H200, B200):
        for m, n, k, reached in device.compute.matmul_mnk_tflop_per_s["bfloat16"]:
            assert rate(device, m, n, k) == pytest.approx(reached, rel=1e-6)


def test_a_larger_product_is_slower_on_hopper_and_no_size_is_above_what_was_measured():
    assert rate(H100, 4096, 4096, 4096) > 1.1 * rate(H100, 8192, 8192, 8192)
    for name in known_devices():
        device = Device.load(name)
        for dtype, rows in device.compute.matmul_mnk_tflop_per_s.items():
            best = max(row[3] for row in rows) * 1e12
            for power in range(5, 22, 2):
                size = 2**power
                rates = (
                    Prices(device).matmul_flop_per_s(dtype, *sizes)
                    for sizes in ((size, size, size), (4096, size, size), (size, 512, 8192))
                )
                assert max(rates) <= best * (1 + 1e-9)


def test_interpolation_is_between_its_rows():
    rows = [(64, 64, 64, 1.0), (1024, 1024, 1024, 16.0)]
    assert interpolated(rows, (256, 256, 256)) == pytest.approx(4)
    assert interpolated(rows, (64, 64, 32)) == pytest.approx(2 / 3, rel=0.01)  # half of the pipeline's fill


def test_widths_off_the_tile_cost():
    """BLOOM's heads at width 13,824: 96 of 144 cost as much as 64 of 216, 128 of 108 a third more a step."""
    prices = Prices(A100)
    scores = {heads: prices.kernel(matmul(2048, 2048, 13824 // heads, heads // 2)) for heads in (64, 96, 128)}
    assert scores[128] > 5 * scores[96]
    assert scores[96] < 2 * scores[64]
    assert prices.kernel(matmul(8192, 6912, 1800)) > prices.kernel(matmul(8192, 6912, 1792))


def test_a_kernel_takes_what_computing_and_moving_do_and_its_launch():
    prices = full(A100)
    copy = Kernel("copy_", 2 * GIB)
    assert prices.kernel(copy) == pytest.approx(2 * GIB / (2039e9 * 0.8) + 3e-6)
    assert prices.kernel(Kernel("add", 0)) == pytest.approx(3e-6)
    computing, moving = 2 * 4096**3 / 255e12, 6 * 4096**2 / (2039e9 * 0.8)
    square = prices.kernel(matmul(4096, 4096, 4096))
    assert square == pytest.approx(math.hypot(computing, moving) + 3e-6)
    assert computing < square < 1.02 * computing
    slower = Prices(A100, efficiency=0.5)
    assert slower.kernel(copy) == pytest.approx(2 * (prices.kernel(copy) - 3e-6) + 3e-6)
    usual = Prices(A100)
    assert usual.efficiency == A100.compute.reached_in_training == 0.91
    assert usual.call(call("all_reduce", GIB, 0, 1)) == slower.call(call("all_reduce", GIB, 0, 1))


def test_attention_has_rates_of_its_own():
    prices = full(A100)
    forward = Kernel("attention_forward", 0, 190e9, torch.bfloat16)
    backward = Kernel("attention_backward", 0, 160e9, torch.bfloat16)
    assert prices.kernel(forward) == pytest.approx(1e-3 + 3e-6)
    assert prices.kernel(backward) == pytest.approx(1e-3 + 3e-6)


def test_fp8_products_have_the_rate_of_bf16_times_the_ratio_of_the_best():
    eight = Prices(H100).matmul_flop_per_s("float8_e4m3fn", 4096, 4096, 4096)
    assert eight == pytest.approx(1.76 * 828e12)
    with pytest.raises(ConfigError, match="must be one that a100-80g multiplies"):
        Prices(A100).matmul_flop_per_s("float8_e4m3fn", 64, 64, 64)


def test_nccl_tests_come_out():
    """nccl-tests on a DGX H100: 1 MiB 27.4 microseconds, 1 GiB at 466 GB/s of bus bandwidth."""
    prices, ranks = Prices(H100), tuple(range(8))
    assert prices.call(call("all_reduce", MIB, *ranks)) == pytest.approx(27.4e-6, rel=0.02)
    assert prices.call(call("all_reduce", GIB, *ranks)) == pytest.approx(1.75 * GIB / 466e9)
    assert prices.call(call("all_reduce", 8, *ranks)) == pytest.approx(16e-6, rel=0.01)


def test_an_all_reduce_of_four_nodes_is_shared_by_their_nics():
    """B200 with EFA, 4 x 8: 362 GB/s of bus bandwidth at 1 GiB, 229 at 256 MiB, 64 at 16 MiB."""
    prices, ranks = Prices(B200), tuple(range(32))
    for mib, bus in ((1024, 362), (256, 229), (16, 64)):
        seconds = prices.call(call("all_reduce", mib * MIB, *ranks))
        assert 2 * 31 / 32 * mib * MIB / seconds / 1e9 == pytest.approx(bus, rel=0.12)
    wire = 2 * 3 / 4 * GIB / 8 / 50e9  # the formula for each NIC
    assert 0.4 < wire / prices.call(call("all_reduce", GIB, *ranks)) < 0.8
    naive = 2 * 31 / 32 * GIB / 50e9
    assert naive / prices.call(call("all_reduce", GIB, *ranks)) > 3.9 * 1.5


def test_one_member_for_each_node_has_one_nic_and_eight_have_eight():
    prices = Prices(A100)
    one = prices.call(call("all_reduce", GIB, 0, 8, 16, 24))
    eight = prices.call(call("all_reduce", GIB, *range(32)))
    assert one == pytest.approx(8 * eight, rel=0.01)
    assert prices.call(call("all_to_all", GIB, 0, 8)) == pytest.approx(
        prices.call(call("all_to_all", GIB, *range(16)))
    )
    assert Prices(A100.with_nic(100)).call(call("all_reduce", GIB, 0, 8)) == pytest.approx(
        2 * prices.call(call("all_reduce", GIB, 0, 8)), rel=0.01
    )


def test_small_calls_pay_for_their_number():
    prices, ranks = Prices(A100), range(8)
    whole = prices.call(call("all_reduce", 64 * MIB, *ranks))
    assert 64 * prices.call(call("all_reduce", MIB, *ranks)) > 3 * whole


def test_sequence_parallelism_is_not_free():
    """A reduce-scatter and an all-gather take longer than the all-reduce: with a switch that adds, much."""
    ranks, nbytes = tuple(range(8)), 512 * MIB

    def ratio(device: Device) -> float:
        prices = Prices(device)
        pair = sum(prices.call(call(name, nbytes, *ranks)) for name in ("all_gather", "reduce_scatter"))
        return pair / prices.call(call("all_reduce", nbytes, *ranks))

    assert 1 < ratio(A100) < 1.1
    assert 1.3 < ratio(H200) < 1.45
    assert 0.95 < ratio(H200.without_nvls()) < 1.05
    large = 16 * GIB
    slow = Prices(H200.without_nvls()).call(call("all_reduce", large, *ranks))
    assert 2 * 7 / 8 * large / slow / 1e9 == pytest.approx(367, rel=0.02)  # NCCL_NVLS_ENABLE=0, measured


def test_messages_and_groups_know_their_nodes():
    prices = Prices(A100)
    near, far = call("send", 64 * MIB, 0, 7), call("recv", 64 * MIB, 7, 8)
    assert prices.call(far) > 5 * prices.call(near)
    assert prices.call(far) == pytest.approx(64 * MIB / 22.5e9)
    assert Prices(A100, gpus_per_node=4).call(near) == pytest.approx(prices.call(far))
    assert prices.call(call("all_reduce", GIB, 3)) == 0
    assert prices.call(call("broadcast", GIB, 0, 1)) > 0 < prices.call(call("barrier", 0, 0, 8))
    with pytest.raises(ConfigError, match="has rates for .all_reduce, all_gather"):
        prices.call(call("scan", 8, 0, 1))
    with pytest.raises(ConfigError, match="must be above 0, but are 8 and 0"):
        Prices(A100, efficiency=0)


def test_an_update_on_the_host_or_its_disks_is_as_slow_as_the_slowest_of_them():
    kinds = {"masters": 4 * 10**9, "moments": 8 * 10**9, "gradients": 4 * 10**9}
    host = A100.host
    on_host, on_disks = (Prices(A100).offloaded(place, kinds) for place in ("cpu", "nvme"))
    assert on_host == pytest.approx(
        max(28 * host.devices / host.memory_gb_per_s, 4 / host.link_gb_per_s_one_way)
    )
    assert on_disks == pytest.approx(12 * host.devices / host.nvme_write_gb_per_s)


def test_pairs_in_a_window():
    """Of two queries that are the last two of four positions, one and both sides of them."""
    assert visible_pairs(2, 4, 1, 0) == 2 + 2
    assert visible_pairs(2, 4, 9, 0) == 3 + 4
    assert visible_pairs(2, 4, 0, 1) == 2 + 1
    assert visible_pairs(4, 4, 9, 9) == 16
