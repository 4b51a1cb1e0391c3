"""The imitation of CUDA on the CPU: what it computes, what it counts, and what it finds."""

import ctypes
from functools import cache
from pathlib import Path

import pytest
import torch

from megazero.kernels.build import build, on_cpu_recipe
from megazero.kernels.on_cpu import ThreadOrder, WatchedLibrary
from tests.kernels.harness import Mirrored
from tests.tables import over_table


@cache
def path():
    return build(on_cpu_recipe([Path(__file__).with_name("faulty.cu")]))


def library(order=ThreadOrder.FORWARD):
    found = WatchedLibrary(path(), order)
    found.reset()
    return found


def run(kernel, *leading, size=512, order=ThreadOrder.FORWARD):
    """What the kernel writes, what it did, and the faults in words."""
    x, y = torch.arange(size, dtype=torch.float32), torch.full((512,), -1.0)
    y[-1] = 0.0
    kernels = library(order)
    kernels.launch(kernel, *leading, x, y)
    report = kernels.report()
    return y, report.kernels[kernel], report.faults


@over_table(
    ("kernel", "count", "words"),
    [
        ("reverse_without_barrier", "races", "a race on shared memory"),
        ("reverse_twice_without_second_barrier", "races", "a race on shared memory"),
        ("barrier_for_some", "divergent_barriers", "a barrier that not all threads reach"),
        ("shuffle_for_some", "divergent_barriers", "a barrier that not all threads reach"),
        ("shuffle_from_outside_of_the_mask", "divergent_barriers", "from a lane outside of its mask"),
        ("misaligned_pack", "misaligned", "a misaligned access"),
        ("read_of_nothing", "unwritten_reads", "that nobody wrote"),
        ("blocks_write_one_place", "races", "a race on global memory"),
        ("arrival_without_fence_before", "races", "a race on global memory"),
        ("arrival_without_fence_after", "races", "a race on global memory"),
        ("arrival_without_barrier", "races", "a race on global memory"),
    ],
)
@over_table("order", ThreadOrder, ids=str)
def test_a_fault_is_found(kernel, count, words, order):
    _, counts, faults = run(kernel, order=order)
    assert getattr(counts.mistakes, count) > 0
    # Who does not wait may also read what is not written yet.
    others = counts.mistakes.unwritten_reads if kernel == "reverse_without_barrier" else 0
    assert counts.mistakes.total == getattr(counts.mistakes, count) + others
    assert any(words in fault for fault in faults)
    assert all(fault.startswith(f"{kernel}: ") and "faulty.cu:" in fault for fault in faults)


@pytest.mark.parametrize(
    ("kernel", "size", "words"),
    [
        ("one_past_the_end", 64, "an access of global memory outside of every buffer"),
        ("past_the_shared_end", 64, "an access of shared memory outside of every array"),
    ],
)
def test_an_access_out_of_bounds_is_found_and_not_carried_out(kernel, size, words):
    kernels = library()
    with pytest.raises(RuntimeError, match=f"the kernel `{kernel}` must start.* illegal memory access"):
        kernels.launch(kernel, torch.zeros(size), torch.zeros(64))
    report = kernels.report()
    assert report.kernels[kernel].mistakes.out_of_bounds == 1
    assert words in report.faults[0]


@over_table("order", ThreadOrder, ids=str)
def test_a_kernel_without_faults_has_none(order):
    y, counts, faults = run("reverse_right", order=order)
    assert y[:64].tolist() == list(range(63, -1, -1))
    assert (counts.mistakes.total, faults) == (0, ())
    assert (counts.launches, counts.threads_per_block, counts.shared_bytes) == (1, 64, 256)


@over_table("order", ThreadOrder, ids=str)
def test_blocks_arrive_in_any_order(order):
    """The last one sees what all have written: three blocks wrote 0 to 63."""
    y, counts, faults = run("arrival_right", order=order)
    assert y[256:320].tolist() == [3 * ((lane + 1) % 64) for lane in range(64)]
    assert (counts.mistakes.total, faults) == (0, ())


def test_a_block_that_no_device_takes_is_refused():
    kernels = library()
    with pytest.raises(RuntimeError, match="invalid configuration"):
        kernels.launch("too_many_threads", torch.zeros(1), torch.zeros(1))
    assert kernels.report().kernels["strided"].mistakes.bad_launches == 1


def test_bytes_and_sectors():
    _, straight, _ = run("reverse_right")
    assert (straight.memory.bytes_read, straight.memory.bytes_written) == (256, 256)
    assert (straight.memory.sectors, straight.memory.ideal_sectors) == (16, 16)
    _, strided, _ = run("strided")  # a sector for each of the 32 floats that are read
    assert (strided.memory.bytes_read, strided.memory.sectors, strided.memory.ideal_sectors) == (
        128,
        32 + 4,
        4 + 4,
    )
    _, twice, _ = run("twice_read")
    assert (twice.memory.bytes_read, twice.memory.bytes_written) == (256, 128)
    _, cached, _ = run("cached")  # by two blocks
    assert (cached.memory.bytes_read, cached.memory.cached_bytes, cached.memory.bytes_moved) == (
        0,
        128,
        128 + 256,
    )


@over_table(("stride", "conflicts"), [(1, 0), (2, 1), (8, 7), (32, 31), (33, 0)])
def test_bank_conflicts(stride, conflicts):
    y, counts, _ = run("banks", stride)
    assert y[:32].tolist() == list(range(32))
    assert (counts.memory.shared_accesses, counts.memory.bank_conflicts) == (2, 2 * conflicts)


@over_table("order", ThreadOrder, ids=str)
def test_what_lanes_receive(order):
    y, counts, _ = run("warp_operations", order=order)
    lanes = range(32)
    assert y[:32].tolist() == [3] * 32
    assert y[32:64].tolist() == [lane ^ 5 for lane in lanes]
    assert y[64:96].tolist() == [lane + 2 if lane < 30 else lane for lane in lanes]
    assert y[96:128].tolist() == [lane - 2 if lane >= 2 else lane for lane in lanes]
    assert y[128:160].tolist() == [11] * 32
    assert y[160:192].tolist() == [sum(lanes)] * 32
    assert y[192:224].tolist() == [31] * 32
    assert y[224:239].tolist() == list(range(1, 16))
    # Lane 15 asks lane 16, which is outside of the mask.
    assert counts.mistakes.divergent_barriers == 1


def test_a_launch_can_be_mirrored_into_other_memory():
    """As the sweeps do it where there is a GPU: views keep their places in one storage."""
    held, kernels = torch.arange(200, dtype=torch.float32), library()
    Mirrored(kernels, "cpu").launch("reverse_right", held[1:65], held[70:134])
    assert held[70:134].tolist() == list(range(64, 0, -1))
    assert held[:70].tolist() == list(range(70))
    assert held[134:].tolist() == list(range(134, 200))


def test_arguments_of_another_kind_are_refused():
    kernels = library()
    with pytest.raises(ctypes.ArgumentError):
        kernels.launch("banks", 1.5, torch.zeros(32), torch.zeros(32))
    with pytest.raises(TypeError):
        kernels.launch("banks", torch.zeros(32), torch.zeros(32))
    with pytest.raises(AttributeError, match="megazero_cuda_nothing"):
        kernels.launch("nothing", torch.zeros(32))


@over_table("stride", [2**31, -(2**31) - 1, 2**32 + 1])
def test_a_size_that_a_parameter_cannot_hold_is_refused(stride):
    with pytest.raises(RuntimeError, match="the kernel `banks` must start, but CUDA says: invalid"):
        run("banks", stride)
