"""Whole trainings of a small network: bytes through the groups, and what is learned for them."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.compressed_adam import Training, chain
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.traffic import TrafficLog, count_traffic
from megazero.optim.compressed.onebit_adam import OnebitAdam
from megazero.optim.compressed.onebit_lamb import OnebitLamb
from megazero.optim.compressed.zero_one_adam import ZeroOneAdam, ZeroOneSteps
from megazero.optim.elementwise import Adam
from megazero.optim.lamb import Lamb

REPLICAS = 2


@cache
def texts():
    return chain(24, 3), chain(24, 4)


def moved(rule, first: int, last: int) -> dict[str, int]:
    """Payload by operation of the steps from `first` to `last`, of the first rank, without the norm's."""
    log, world = TrafficLog(), ThreadWorld(REPLICAS, 60.0)

    def work(rank: int) -> None:
        context = thread_context(world, ProcessGrid(dp=REPLICAS), rank)
        training = Training(rule, count_traffic(context, log) if rank == 0 else context, 32, texts()[0])
        for number in range(1, last + 1):
            if rank == 0 and number == first:
                log.clear()
            training.step(number, 1e-3)

    world.run(work)
    found: dict[str, int] = {}
    for (_, operation), size in log.payload.items():
        found[operation] = found.get(operation, 0) + size
    found["all_reduce"] -= 8 * (last - first + 1)
    return {operation: size for operation, size in found.items() if size}


def test_bytes_to_the_byte():
    """One parameter in eight bits' bytes twice, and scales; 0/1 Adam as much, but once in four steps."""
    sizes = [32 * 32, 128 * 32, 32, 32 * 32, 32, 32 * 32, 32]  # symbols; weights and biases of three layers
    elements, count = sum(sizes), len(sizes)
    exact = moved(Adam(), 3, 6)
    assert exact == {"all_reduce": 4 * 4 * elements}
    bits = elements // 8
    step = {"all_to_all": bits, "all_gather": bits + 4 * count * REPLICAS, "all_reduce": 16 * count}
    assert moved(OnebitAdam(2), 3, 6) == {operation: 4 * size for operation, size in step.items()}
    # An all-reduce moves its payload twice: of fp16, 4 bytes per element.
    assert 2 * bits == 4 * elements / 16
    rule = ZeroOneAdam(ZeroOneSteps(2, local_step_scaler=1, local_step_clipper=4))
    assert [n for n in range(7, 15) if rule.steps.exchanges(n)] == [10, 14]
    assert moved(rule, 7, 10) == step
    lamb = moved(OnebitLamb(2), 3, 3)
    assert lamb == step, "norms are of whole weights here, and the largest ratio too"


@pytest.mark.parametrize(
    "rule",
    [
        OnebitAdam(40),
        ZeroOneAdam(ZeroOneSteps(40, local_step_scaler=40, local_step_clipper=4)),
    ],
    ids=["1-bit Adam", "0/1 Adam"],
)
def test_it_learns_what_adam_learns(rule):
    assert abs(learned(rule) - learned(Adam())) < 0.02


@pytest.mark.slow
def test_one_bit_lamb_learns_about_what_lamb_learns():
    """From 3.47 to 1.99, and 0.023 less far."""
    assert abs(learned(OnebitLamb(40, Lamb(adapt_all=True))) - learned(Lamb(adapt_all=True))) < 0.05


@cache
def learned(rule) -> float:
    """The loss on unseen symbols after a training; untrained it is 3.47."""
    world = ThreadWorld(REPLICAS, 120.0)

    def work(rank: int) -> float:
        training = Training(rule, thread_context(world, ProcessGrid(dp=REPLICAS), rank), 64, texts()[0])
        for number in range(200):
            training.step(number, (2e-2 if "Lamb" in type(rule).__name__ else 4e-3) * (1 - number / 200))
        return training.loss(texts()[1])

    return sum(world.run(work)) / REPLICAS
