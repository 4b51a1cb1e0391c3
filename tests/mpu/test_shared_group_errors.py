"""What the members of a group in shared memory are told when a call cannot be done, and how soon."""

from __future__ import annotations

import os
import signal
import time
import uuid
from types import SimpleNamespace

import pytest
import torch

from megazero.mpu import shared_open
from megazero.mpu.shared_group import SharedGroup
from tests.mpu.test_shared_group import SLOT, _base, _failure, _shared

pytest.importorskip("megazero.mpu._native", reason="the shared memory of csrc/mpu is not built")
pytestmark = pytest.mark.gloo


def _different_calls(rank: int, n: int) -> list[tuple[str, str]]:
    def floats(elements: int) -> torch.Tensor:
        return torch.zeros(elements)

    calls = [
        (lambda g: g.all_reduce(floats(2)), lambda g: g.all_reduce(floats(3))),
        (lambda g: g.all_reduce(floats(2)), lambda g: g.all_reduce(floats(2).bfloat16())),
        (lambda g: g.barrier(), lambda g: g.all_reduce(floats(2), "max", async_op=True).wait()),
        (lambda g: g.broadcast(floats(2), 0), lambda g: g.all_gather(floats(4), floats(2))),
        (lambda g: g.all_to_all(floats(3), floats(3), [2, 1], [2, 1]),) * 2,
    ]
    found = []
    for pair in calls:
        group = _shared(rank, n)
        first = _failure(lambda call=pair[rank], group=group: call(group))
        later = _failure(lambda group=group: group.barrier())
        found.append((first, later))
        group.close()
    return found


def test_members_that_make_different_calls_are_told_all_of_them(pool):
    differences = [
        "rank 0: all_reduce(sum) (2,) torch.float32; rank 1: all_reduce(sum) (3,) torch.float32",
        "rank 0: all_reduce(sum) (2,) torch.float32; rank 1: all_reduce(sum) (2,) torch.bfloat16",
        "rank 0: barrier; rank 1: all_reduce(max) (2,) torch.float32",
        "rank 0: broadcast(from 0) (2,) torch.float32; rank 1: all_gather (2,) torch.float32",
        "rank 0 sends 4 bytes to rank 1, which expects 8",
    ]
    for rank, found in enumerate(pool.run(_different_calls, 2)):
        for difference, (first, later) in zip(differences, found, strict=True):
            assert difference in first
            assert "(call 1)` over group `world` (ranks [0, 1], shared memory)" in first
            assert f"failed on rank {rank}" in first
            assert f"an earlier call failed: {first.partition(f'rank {rank}: ')[2]}" in later


def _refused_arguments(rank: int, n: int) -> list[str]:
    group = _shared(rank, n)
    found = [
        _failure(lambda: group.all_reduce(torch.zeros(4, 4).t())),
        _failure(lambda: group.all_gather(torch.zeros(3), torch.zeros(2))),
        _failure(lambda: group.reduce_scatter(torch.zeros(2), torch.zeros(4, dtype=torch.float64))),
        _failure(lambda: group.all_to_all(torch.zeros(2), torch.zeros(2), [1, 1], [1, 2])),
    ]
    group.barrier()  # nothing has happened to it
    group.close()
    return found


def test_unsuitable_tensors_are_refused_before_anything_is_sent(pool):
    for found in pool.run(_refused_arguments, 2):
        assert "must be contiguous, but one has strides (1, 4)" in found[0]
        assert "must be 2 times as large" in found[1]
        assert "must be 2 times as large as the smaller and of its dtype" in found[2]
        assert (
            "input splits of `all_to_all` over group `world` must be 2 counts that add up to 2 rows"
            in found[3]
        )


def _missing_member(rank: int, n: int) -> list[str]:
    found = []
    for action in (
        lambda group: group.barrier(),
        lambda group: group.all_reduce(torch.zeros(2), async_op=True).wait(),
    ):
        group = _shared(rank, n, timeout=0.25)
        if rank == 0:
            found.append(_failure(lambda action=action, group=group: action(group)))
        _base(rank, n).barrier()
        if rank == 2:  # late: it learns at once that rank 0 has given up
            found.append(_failure(group.barrier))
        _base(rank, n).barrier()
        group.close()
    return found


def test_a_member_that_never_comes_is_named(pool):
    waiting, _, late = pool.run(_missing_member, 3)
    assert "`barrier (call 1)`" in waiting[0]
    assert "rank 1, rank 2 did not arrive within 0.25 s" in waiting[0]
    assert "`all_reduce(sum) (2,) torch.float32 (call 1)`" in waiting[1]
    assert "rank 1, rank 2 did not arrive within 0.25 s" in waiting[1]
    assert all("rank 0 gave up; see its error" in each for each in late)


def test_a_killed_member_is_noticed_and_named():
    """Two processes of this test's own, since the pool does not lend its workers to be killed."""
    path = shared_open.FOLDER / f"megazero-{uuid.uuid4()}"
    file = shared_open._create(path, 2, SLOT)
    path.unlink()
    is_there, say_so = os.pipe()
    # Both are there before either waits: a member waiting for one that never came would take it for gone.
    own = shared_open.NATIVE.Link(file, 0, [0, 1], SLOT, 60.0)
    child = os.fork()
    if child == 0:
        try:
            link = shared_open.NATIVE.Link(file, 1, [0, 1], SLOT, 60.0)
            os.write(say_so, b"!")
            link.barrier("barrier")
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.read(is_there, 1)
    base = SimpleNamespace(name="pair", rank=0, ranks=(0, 1), close=lambda: None)
    group = SharedGroup(base, own)
    group.barrier()
    start = time.monotonic()
    # Nobody has collected the dead child yet: its process number is still taken.
    work = group.all_reduce(torch.zeros(10), async_op=True)
    assert f"rank 1 (process {child}) has ended or left the group" in _failure(work.wait)
    assert time.monotonic() - start < 3
    assert os.waitpid(child, 0) == (child, signal.SIGKILL)
    group.close()
    os.close(is_there)
    os.close(say_so)
