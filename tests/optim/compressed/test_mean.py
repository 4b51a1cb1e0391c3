"""The compressed mean against its formula, over every kind of group; its traffic to the byte."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from megazero.mpu.group import Group
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.traffic import CountingGroup, TrafficLog
from megazero.optim.compressed.mean import compressed_mean
from megazero.optim.compressed.signs import packed_size
from megazero.optim.rule import Replicas
from tests.optim.compressed.reference import Mean

ROUNDS = 6
SIZES = (13, 1, 0, 40)
NUMEL = sum(SIZES)


def spans() -> list[tuple[int, int]]:
    stops = torch.tensor(SIZES).cumsum(0).tolist()
    return [(stop - size, stop) for size, stop in zip(SIZES, stops, strict=True)]


def drawn(number: int, rank: int) -> torch.Tensor:
    """A replica's numbers of a round; each parameter has a magnitude of its own."""
    found = torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * number + rank))
    for magnitude, (start, stop) in zip((1.0, 100.0, 1.0, 1e-3), spans(), strict=True):
        found[start:stop] *= magnitude
    return found


def living() -> torch.Tensor:
    live = torch.ones(NUMEL, dtype=torch.bool)
    live[[2, 20, 53]] = False
    return live


def fresh(group: Group, numel: int = NUMEL, where=None) -> Replicas:
    size = max(1, -(-numel // group.size))
    return Replicas(
        group,
        spans() if where is None else where,
        torch.zeros(size * group.size),
        torch.zeros(size),
        lambda measured, operation: None,
        [0.1] * len(SIZES),
    )


def padded(numbers: torch.Tensor, replicas: Replicas) -> torch.Tensor:
    return torch.nn.functional.pad(numbers, (0, replicas.worker_error.numel() - numbers.numel()))


def rounds(group: Group) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Each round's result, and the errors after it."""
    replicas, found = fresh(group), []
    live = padded(living(), replicas)
    for number in range(ROUNDS):
        numbers = padded(drawn(number, group.rank), replicas)
        compressed_mean(numbers, live, replicas)
        found.append((numbers, replicas.worker_error.clone(), replicas.server_error.clone()))
    return found


def check(ranks: list) -> None:
    """Against the formula; the results of all ranks are the same bits."""
    means = [Mean() for _ in SIZES]
    for number in range(ROUNDS):
        results, workers, servers = zip(*(each[number] for each in ranks), strict=True)
        assert all(result.equal(results[0]) for result in results)
        server = torch.cat(servers)
        for mean, (start, stop) in zip(means, spans(), strict=True):
            numbers = [drawn(number, rank)[start:stop] for rank in range(len(ranks))]
            want = mean(numbers, living()[start:stop])
            close = {"rtol": 1e-5, "atol": 1e-5 * float(want.abs().max()) if stop > start else 0.0}
            torch.testing.assert_close(results[0][start:stop].double(), want, **close)
            torch.testing.assert_close(server[start:stop].double(), mean.server, **close)
            for rank, worker in enumerate(workers):
                torch.testing.assert_close(worker[start:stop].double(), mean.workers[rank], **close)
        for tensor in (*results, *workers, server):
            assert not tensor[NUMEL:].any(), "padding stays 0"
            assert not tensor[:NUMEL][~living()].any()


def test_alone():
    check([rounds(SoloGroup())])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_threads(size):
    world = ThreadWorld(size, timeout=20)
    check(world.run(lambda rank: rounds(world.group("g", rank, tuple(range(size))))))


def _gloo(rank: int, world_size: int) -> list:
    from megazero.mpu.torch_group import open_group

    return rounds(open_group("world", rank, tuple(range(world_size)), timedelta(seconds=30)))


@pytest.mark.gloo
@pytest.mark.parametrize("size", [2, 3])
def test_processes(pool, size):
    check(pool.run(_gloo, size))


def test_every_kind_of_group_gives_the_same_bits(pool):
    world = ThreadWorld(2, timeout=20)
    threads = world.run(lambda rank: rounds(world.group("g", rank, (0, 1))))
    for mine, theirs in zip(threads, pool.run(_gloo, 2), strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert all(a.equal(b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
def test_what_is_left_out_is_not_lost():
    """Of the same numbers again and again, the mean of the results tends to the mean of the numbers."""
    size, steps = 3, 400
    world = ThreadWorld(size, timeout=60)

    def work(rank: int) -> torch.Tensor:
        replicas = fresh(world.group("g", rank, tuple(range(size))))
        total = torch.zeros_like(replicas.worker_error)
        for _ in range(steps):
            numbers = padded(drawn(0, rank), replicas)
            compressed_mean(numbers, padded(living(), replicas), replicas)
            total += numbers
        return total / steps

    found = world.run(work)[0][:NUMEL]
    want = torch.where(living(), sum(drawn(0, rank) for rank in range(size)) / size, 0.0)
    for start, stop in spans():
        if stop > start:
            error = (found[start:stop] - want[start:stop]).abs().max()
            assert error < 0.05 * want[start:stop].abs().max()


@pytest.mark.parametrize("size", [2, 4])
def test_traffic_is_a_bit_per_element_each_way_and_the_scales(size):
    """Payloads are of the larger side of a call; of it, a rank moves the share (N - 1) / N."""
    numel, count = 8000 * size, 5
    where = [(i * numel // count, (i + 1) * numel // count) for i in range(count)]
    log, world = TrafficLog(), ThreadWorld(size, timeout=20)

    def work(rank: int) -> None:
        group = world.group("g", rank, tuple(range(size)))
        if rank == 0:
            group = CountingGroup(group, log)
        replicas = fresh(group, numel, where)
        compressed_mean(torch.ones(numel), torch.ones(numel, dtype=torch.bool), replicas)

    world.run(work)
    bits = size * packed_size(numel // size)
    assert log.payload == {
        ("g", "all_to_all"): bits,
        ("g", "all_gather"): bits + 4 * count * size,
        ("g", "all_reduce"): 16 * count,
    }
    # An all-reduce is a reduce-scatter and an all-gather: it moves its payload twice.
    scales = 4 * count * size + 2 * 16 * count
    moved = 2 * log.payload["g", "all_reduce"] + sum(
        log.payload["g", operation] for operation in ("all_to_all", "all_gather")
    )
    assert moved - scales == 2 * (2 * numel) / 16, "a sixteenth of what an all-reduce of fp16 moves"
