"""The group in shared memory: the numbers of every call, messages, and what is left at the end."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megazero.errors import CommunicationError
from megazero.mpu import shared_open
from megazero.mpu.group import Group, Transfer
from megazero.mpu.shared_group import SharedGroup
from megazero.mpu.shared_open import open_shared
from megazero.mpu.torch_group import TorchGroup, open_group
from tests.mpu.test_groups import conform, expected

pytest.importorskip("megazero.mpu._native", reason="the shared memory of csrc/mpu is not built")
pytestmark = pytest.mark.gloo

SLOT = 1 << 18
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
# Nothing, one, odd, exactly a slot of fp32, just over it, several.
SIZES = (0, 1, 7, SLOT // 4, SLOT // 4 + 1, 150_001)


def _base(rank: int, world_size: int, name: str = "world") -> TorchGroup:
    return open_group(name, rank, tuple(range(world_size)), timedelta(seconds=30))


def _shared(rank: int, world_size: int, timeout: float = 30.0, name: str = "world") -> SharedGroup:
    base = _base(rank, world_size, name)
    group = open_shared(base, timedelta(seconds=timeout), slot_bytes=SLOT)
    assert isinstance(group, SharedGroup)
    assert isinstance(group, Group)
    return group


def _values(rank: int, elements: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return (torch.randn(elements, generator=generator, dtype=torch.float64) * 8).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 40, (elements,), generator=generator).to(dtype)


def _reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """In rank order, half precision in fp32 and rounded once."""
    dtype = inputs[0].dtype
    if dtype == torch.bool:
        stack = torch.stack(inputs)
        return stack.all(0) if op == "min" else stack.any(0)
    if op != "sum":
        combine = torch.maximum if op == "max" else torch.minimum
        total = inputs[0]
        for each in inputs[1:]:
            total = combine(total, each)
        return total
    wide = torch.float32 if dtype.itemsize == 2 and dtype.is_floating_point else dtype
    total = inputs[0].to(wide)
    for each in inputs[1:]:
        total = total + each.to(wide)
    return total.to(dtype)


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest() if tensor.numel() else ""


def _failure(action) -> str:
    try:
        action()
    except CommunicationError as error:
        return str(error)
    return "no failure"


def _conform(rank: int, world_size: int) -> dict:
    group = _shared(rank, world_size)
    try:
        return conform(group)
    finally:
        group.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_conforms(pool, world_size):
    found = pool.run(_conform, world_size)
    assert found == [expected(rank, world_size) for rank in range(world_size)]


def _reduce_everything(rank: int, n: int) -> list[str]:
    group = _shared(rank, n)
    digests = []
    cases = [(dtype, elements, "sum") for dtype in FLOATS for elements in SIZES]
    cases += [(dtype, SLOT // 4 + 1, "sum") for dtype in INTEGERS]
    cases += [(dtype, 1001, op) for dtype in FLOATS + INTEGERS for op in ("max", "min")]
    for dtype, elements, op in cases:
        inputs = [_values(r, elements, dtype) for r in range(n)]
        whole = inputs[rank].clone()
        group.all_reduce(whole, op).wait()
        assert torch.equal(whole, _reduced(inputs, op)), (dtype, elements, op)
        digests.append(_digest(whole))
        inputs = [_values(r, n * elements, dtype, seed=1) for r in range(n)]
        part = torch.empty(elements, dtype=dtype)
        group.reduce_scatter(part, inputs[rank], op).wait()
        mine = slice(rank * elements, (rank + 1) * elements)
        assert torch.equal(part, _reduced(inputs, op)[mine]), (dtype, elements, op)
    group.close()
    return digests


@pytest.mark.parametrize("world_size", [2, 3])
def test_reductions_of_every_size_and_dtype_are_the_same_bits_everywhere(pool, world_size):
    digests = pool.run(_reduce_everything, world_size)
    assert all(each == digests[0] for each in digests)


def _move_everything(rank: int, n: int) -> None:
    group = _shared(rank, n)
    for dtype in (torch.float32, torch.bool, torch.complex64):
        for elements in SIZES:
            inputs = [_values(r, elements, torch.int64).to(dtype) for r in range(n)]
            gathered = torch.empty(n * elements, dtype=dtype)
            group.all_gather(gathered, inputs[rank]).wait()
            assert torch.equal(gathered, torch.cat(inputs)), (dtype, elements)
            copy = inputs[rank].clone()
            group.broadcast(copy, n - 1).wait()
            assert torch.equal(copy, inputs[n - 1]), (dtype, elements)
    # Rows of three, from r to p (r + 2 p) % 5 thousand of them: none, some, and more than a slot.
    counts = [[(r + 2 * p) % 5 * 10_000 for p in range(n)] for r in range(n)]
    rows = [torch.full((sum(counts[r]), 3), float(r)) for r in range(n)]
    for r in range(n):
        rows[r] += torch.arange(float(len(rows[r])))[:, None]
    output = torch.empty(sum(counts[r][rank] for r in range(n)), 3)
    group.all_to_all(output, rows[rank], [counts[r][rank] for r in range(n)], counts[rank]).wait()
    assert torch.equal(output, torch.cat([rows[r].split(counts[r])[rank] for r in range(n)]))
    group.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_moving_calls_of_every_size(pool, world_size):
    pool.run(_move_everything, world_size)


def _all_halves(rank: int, n: int) -> None:
    group = _shared(rank, n)
    everything = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float16, torch.bfloat16):
        for _ in range(2):
            other = everything[torch.randperm(1 << 16, generator=generator)].view(dtype)
            inputs = [everything.view(dtype), other]
            for op in ("sum", "max"):
                whole = inputs[rank].clone()
                group.all_reduce(whole, op).wait()
                torch.testing.assert_close(whole, _reduced(inputs, op), rtol=0, atol=0, equal_nan=True)
    group.close()


def test_every_half_and_bfloat_rounds_as_torch_does(pool):
    pool.run(_all_halves, 2)


def _under_way(rank: int, n: int) -> tuple[list[float], bool]:
    group, other = _shared(rank, n), _shared(rank, n, name="other")
    tensors = [torch.full((100_000,), float(i + rank)) for i in range(6)]
    works = [(group if i % 2 else other).all_reduce(tensors[i], async_op=True) for i in range(5)]
    del works[3]  # nobody waits for it
    group.all_reduce(tensors[5])  # overtakes nothing
    # The members wait for different calls first, and one in another thread.
    order = works if rank else works[::-1]
    order[0].wait()
    thread = threading.Thread(target=order[1].wait)
    thread.start()
    for work in order[2:] + order[:1]:
        work.wait()
    thread.join()
    group.barrier()
    same = all(bool((each == each[0]).all()) for each in tensors)
    group.close()
    other.close()
    return [each[0].item() for each in tensors], same


def test_calls_under_way_keep_their_order_however_they_are_waited_for(pool):
    assert pool.run(_under_way, 2) == [([1.0, 3.0, 5.0, 7.0, 9.0, 11.0], True)] * 2


def _left_to_itself(rank: int, n: int) -> bool:
    group = _shared(rank, n)
    tensor = torch.full((300_000,), 1.0)
    group.all_reduce(tensor, async_op=True)
    deadline = time.monotonic() + 20
    while tensor[-1] != 2.0 and time.monotonic() < deadline:
        time.sleep(0.001)
    done = bool((tensor == 2.0).all())
    group.barrier()
    group.close()
    return done


def test_a_call_makes_progress_while_nobody_waits(pool):
    assert pool.run(_left_to_itself, 2) == [True, True]


def _exchange(rank: int, n: int) -> bool:
    group = _shared(rank, n)
    got = torch.zeros(3)
    peer = 1 - rank
    for work in group.exchange(
        [Transfer("send", torch.full((3,), rank + 1.0), peer, 5), Transfer("recv", got, peer, 5)]
    ):
        work.wait()
    group.close()
    return bool((got == peer + 1.0).all())


def test_messages_go_over_gloo(pool):
    assert pool.run(_exchange, 2) == [True, True]


def _open_files() -> list[str]:
    """What this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


def _many_groups(rank: int, n: int) -> list:
    base = _base(rank, n)
    before = len(list(Path("/proc/self/task").iterdir()))
    # Of other tests in this process, which do not count.
    others, maps = set(_open_files()), Path("/proc/self/maps").read_text().count("megazero-")
    groups = [open_shared(base, timedelta(seconds=30), slot_bytes=SLOT) for _ in range(12)]
    tensors = [torch.full((1000,), float(i)) for i in range(12)]
    for work in [group.all_reduce(t, async_op=True) for group, t in zip(groups, tensors, strict=True)][::-1]:
        work.wait()
    right = all(bool((t == 2.0 * i).all()) for i, t in enumerate(tensors))
    base.barrier()
    files = [path for path in _open_files() if "megazero-" in path and path not in others]
    unnamed = len(files) == 12 and all(path.endswith(" (deleted)") for path in files)
    abandoned = torch.zeros(10)
    if rank == 0:  # under way at the end
        groups[0].all_reduce(abandoned, async_op=True)
    start = time.monotonic()
    for group in groups:
        group._link.close()
    closed = time.monotonic() - start < 10
    failure = _failure(groups[0].barrier)
    files = [path for path in _open_files() if "megazero-" in path and path not in others]
    mapped = Path("/proc/self/maps").read_text().count("megazero-") > maps
    threads = len(list(Path("/proc/self/task").iterdir())) - before
    base.barrier()
    return [right, unnamed, closed, failure.rpartition(": ")[2], files, mapped, threads]


def test_many_groups_leave_nothing_behind(pool):
    nothing = [True, True, True, "the group was closed", [], False, 0]
    assert pool.run(_many_groups, 2) == [nothing] * 2


def _fallbacks(rank: int, n: int) -> list[str]:
    def reason(**sizes: int) -> str:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            base = _base(rank, n)
            assert open_shared(base, timedelta(seconds=5), **sizes) is base
        return str(caught[0].message) if caught else ""

    def replaced(name: str, value: object, **sizes: int) -> str:
        kept = getattr(shared_open, name)
        setattr(shared_open, name, value)
        try:
            return reason(**sizes)
        finally:
            setattr(shared_open, name, kept)

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        found = [
            reason(slot_bytes=1 << 44),
            replaced("_host", lambda: f"host {rank}"),
            # The second member alone: the others must learn of it.
            replaced("FOLDER", Path("/nowhere" if rank == 1 else folder)),
            replaced("NATIVE", None if rank == 1 else shared_open.NATIVE),
        ]
        assert os.listdir(folder) == []
    assert conform(_base(rank, n)) == expected(rank, n)
    return found


def test_where_memory_cannot_be_shared_the_first_member_says_why_and_gloo_serves(pool):
    first, second = pool.run(_fallbacks, 2)
    assert all(each.startswith("ranks of this host talk over Gloo, which is slower: ") for each in first)
    for reason, words in zip(
        first,
        ("/dev/shm cannot be used", "on 2 hosts", "/nowhere cannot be used", "is not built"),
        strict=True,
    ):
        assert words in reason
    assert second == [""] * 4
