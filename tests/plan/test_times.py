"""Times of sections: exchanges are one call, and on a CPU what is waited for later costs as much."""

from __future__ import annotations

import pytest

from megazero.account.profilers.calls import CollectiveCall
from megazero.config.resolve import parse_config
from megazero.config.steps import Progress
from megazero.plan.job import PlannedJob
from megazero.plan.times import duration_of, exchanges, section_duration
from megazero.plan.trace import trace_rank
from megazero.plan.work import Kernel, StepSection, Wait

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 64 --mock-data "
    "--micro-batch-size 1 --global-batch-size 2 --lr 1e-4 --train-iters 4 --context-parallel-size 2"
)


class Prices:
    """A kernel takes 10 s, a call 1 s and one more for every 100 bytes."""

    def kernel(self, kernel: Kernel) -> float:
        return 10.0

    def call(self, call: CollectiveCall) -> float:
        return 1 + call.nbytes / 100


def message(kind: str, nbytes: int, number: int) -> CollectiveCall:
    return CollectiveCall("cp", kind, nbytes, (0, 1), later=True, number=number)


EXCHANGE = (
    message("send", 200, 7),
    message("recv", 100, 7),
    message("send", 300, 7),
    message("recv", 150, 7),
)


def test_messages_under_way_at_once_are_one_call():
    kernel, other = Kernel("mm", 8), message("send", 50, 8)
    assert list(exchanges((kernel, *EXCHANGE, other, kernel))) == [
        kernel,
        CollectiveCall("cp", "exchange", 500, (0, 1), later=True, number=7),
        other,
        kernel,
    ]


@pytest.mark.parametrize(("kernels", "exposed"), [(0, 6.0), (1, 0.0)])
def test_an_exchange_is_exposed_where_no_kernel_hides_it(kernels, exposed):
    work = (*EXCHANGE, *[Kernel("mm", 8)] * kernels, Wait(7), Wait(7))
    duration = duration_of(work, Prices())
    assert (duration.kernels, duration.exposed, duration.beside) == (10.0 * kernels, exposed, 0)


def test_on_a_cpu_calls_add_to_kernels_whenever_they_are_waited_for():
    blocking, later = (
        CollectiveCall("tp", "all_reduce", 100, (0, 1), later=x, number=x + 1) for x in (False, True)
    )
    section = StepSection((blocking, later, Wait(2), *EXCHANGE), 0, 0, seconds=5.0)
    duration = section_duration(section, Prices())
    assert (duration.total, duration.kernels, duration.exposed) == (15.0, 5.0, 10.0)


def test_a_ring_s_exchanges_are_waited_for_in_a_trace():
    job = PlannedJob(parse_config(FLAGS.split(), world_size=2).config, 2, True, Progress())
    work = [part for section in trace_rank(job, 0).actions.values() for part in section.work]
    rings = {
        part.number
        for part in work
        if isinstance(part, CollectiveCall) and part.operation in ("send", "recv")
    }
    assert rings
    assert rings <= {part.call for part in work if isinstance(part, Wait)}
