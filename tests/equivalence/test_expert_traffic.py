"""What experts send: each row once to each rank that has a slice of its expert, and once back."""

from __future__ import annotations

import pytest

from megazero.mpu.traffic import TrafficLog, recording_context
from tests.equivalence.test_traffic import FP32, HIDDEN, few_micro_batches, step, traffic
from tests.layouts.layout import SEQUENCE, Layout

LAYERS = 2
PASSES = 4  # to the experts and back, in forward and in backward


def sent(logs: list[TrafficLog], kind: str) -> int:
    return sum(log.payload["expert", kind] for log in logs)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, ep=2),
        Layout(dp=4, ep=4, zero=3),
        Layout(tp=2, dp=2, ep=2, etp=2, sequence_parallel=True),
        Layout(tp=2, dp=2, ep=4, etp=1),
        Layout(pp=2, dp=2, ep=2, schedule="zb-h1", layers=2),
        Layout(tp=2, etp=2),
    ],
    ids=lambda layout: layout.name,
)
@pytest.mark.parametrize("kind", ["top2", "random"])
def test_all_to_all_sends_each_row_to_each_slice_and_back(layout, kind):
    """Padded to the capacity, each rank sends as many rows for each expert, whoever is chosen."""
    layout = Layout(**{**vars(layout), "experts": kind})
    slices, ranks, config = layout.etp or layout.tp, layout.tp * layout.dp, few_micro_batches(layout)
    batch = config.batch.global_batch_size
    rows = 2 * batch * SEQUENCE  # two choices of each token
    if kind == "random":
        room, experts = SEQUENCE * 2 // 4, 4
        # Each rank has room for whole sequences, whose tokens tensor-parallel ranks share.
        rows = layout.tp * batch * experts * room
    assert layout.ep * slices == ranks, "no replicas of experts"
    assert sent(traffic(layout, config), "all_to_all") == PASSES * LAYERS * rows * slices * HIDDEN * FP32


def test_recompute_sends_the_way_there_again():
    """It computes a layer's forward anew, the way to the experts and back included."""
    plain, again = Layout(dp=2, ep=2, experts="top2"), Layout(dp=2, ep=2, experts="top2", recompute="full")
    bytes_plain, bytes_again = (sent(traffic(x, few_micro_batches(x)), "all_to_all") for x in (plain, again))
    assert bytes_again * PASSES == bytes_plain * (PASSES + 2)


def test_all_gather_brings_every_token_to_every_rank():
    layout = Layout(dp=2, ep=2, experts="top2", dispatcher="allgather")
    config = few_micro_batches(layout)
    tokens = config.batch.global_batch_size * SEQUENCE
    hidden = 2 * tokens * HIDDEN * FP32  # of both ranks, on both
    weights = 2 * 2 * tokens * FP32
    found = traffic(layout, config)
    assert sent(found, "all_to_all") == 0
    # Forward gathers the tokens and their weights and scatters the results; backward does the opposite.
    assert sent(found, "reduce_scatter") == LAYERS * (2 * hidden + weights)
    chosen = LAYERS * 2 * 2 * tokens * (8 + 1)  # experts as int64, and whether each choice counts
    assert sent(found, "all_gather") == LAYERS * (2 * hidden + weights) + chosen


@pytest.mark.parametrize(
    "layout",
    [
        Layout(experts="random", dp=2, ep=2, zero=2),
        Layout(experts="random", tp=2, dp=2, ep=2, sequence_parallel=True, recompute="full"),
        Layout(experts="random", tp=2, dp=2, ep=4, etp=1, zero=3),
        Layout(experts="random", pp=2, dp=2, ep=2, schedule="zb-h1", layers=2),
    ],
    ids=lambda layout: layout.name,
)
def test_recorded_traffic_is_what_ranks_count(layout):
    """With padding the sizes do not depend on the data, so one rank on the meta device knows them."""
    config = few_micro_batches(layout)
    for rank, counted in enumerate(traffic(layout, config)):
        log = TrafficLog()
        step(config, recording_context(layout.grid, rank, log), log)
        assert log == counted, f"rank {rank}"
