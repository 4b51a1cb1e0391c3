"""Slow ranks are named with their share, and healthy ones never."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest

from megazero.config.resolve import parse_config
from megazero.mpu.context import ParallelContext, solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.waits import Waited
from megazero.mpu.watch.group import watched
from megazero.mpu.watch.watch import Watch, WatchLimits
from megazero.train.observe.stragglers import RankTimes, SlowRanks, Straggler, Stragglers
from megazero.train.pretraining import pretrain_on
from megazero.train.step.feed import Feed
from tests.mpu.test_watch import Notes, Spared
from tests.tables import over_table


def times(*own: float, step: float | None = None, data: dict[int, float] | None = None) -> list[RankTimes]:
    step = max(own) if step is None else step
    return [RankTimes(each, step - each, (data or {}).get(rank, 0.001)) for rank, each in enumerate(own)]


def found(gatherings: list[list[RankTimes]], stages: list[int]) -> list[Straggler]:
    known, result = SlowRanks(), []
    for number, each in enumerate(gatherings, 1):
        known, new = known.after(number, each, stages)
        result += new
    return result


def test_a_rank_that_is_slow_three_times_in_a_row_is_named_once_with_its_share():
    slow = times(0.44, 0.43, 0.45, 0.84, step=1.2)
    (one,) = found([slow] * 9, [0] * 4)
    assert (one.rank, one.iteration, one.recovered, one.stage) == (3, 3, False, None)
    assert str(one) == (
        "rank 3 takes 1.9 times its peers' time: 840 ms of its own per step against 440 ms; the others wait "
        "for 760 ms of a step's 1,200 ms"
    )
    assert json.loads(json.dumps(asdict(one)))["rank"] == 3


def test_it_is_named_again_when_it_has_recovered():
    slow, fine = times(0.4, 0.4, 0.8), times(0.4, 0.4, 0.41)
    first, second = found([slow] * 5 + [fine, fine, slow, fine, fine, fine, fine], [0] * 3)
    assert (first.iteration, second.iteration) == (3, 11)
    assert second.recovered
    assert (
        str(second) == "rank 2 is no longer slower than its peers: 410 ms of its own per step against 400 ms"
    )


def test_slow_data_is_told_apart():
    (one,) = found([times(0.4, 0.4, 0.8, data={2: 0.35})] * 3, [0] * 3)
    assert str(one).endswith("; reading data is what is slow, 350 ms against 1 ms")
    (other,) = found([times(0.4, 0.4, 0.8, data={2: 0.1})] * 3, [0] * 3)
    assert not other.reads_slowly


def test_ranks_are_compared_within_their_stage():
    """The last stage does twice the work of the first one, which is nobody's fault."""
    assert found([times(0.4, 0.4, 0.8, 0.8)] * 9, [0, 0, 1, 1]) == []
    (one,) = found([times(0.4, 0.4, 0.8, 1.3)] * 9, [0, 0, 1, 1])
    assert (one.rank, one.ratio) == (3, pytest.approx(1.3 / 0.8))


def test_a_rank_alone_in_its_stage_is_compared_with_all_and_its_message_says_so():
    (one,) = found([times(0.4, 0.4, 0.8)] * 3, [0, 1, 2])
    assert str(one).endswith("; it is alone in stage 2 of the pipeline, whose work may be more")


def test_two_in_a_row_and_tiny_differences_are_nothing():
    slow, fine = times(0.4, 0.4, 0.8), times(0.4, 0.4, 0.4)
    assert found([slow, slow, fine] * 5, [0] * 3) == []
    assert found([times(0.002, 0.002, 0.009)] * 9, [0] * 3) == []


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_noise_is_never_taken_for_a_slow_rank(ranks):
    """Steps vary by half, one in fifty takes ten times as long, and cores are shared for a while."""
    draw = np.random.default_rng(7)
    known = SlowRanks()
    for number in range(400):
        steps = (
            0.1 * draw.lognormal(0.0, 0.5, (100, ranks)) * np.where(draw.random((100, ranks)) < 0.02, 10, 1)
        )
        own = steps.mean(0) * draw.uniform(0.9, 1.1, ranks)
        known, new = known.after(number, times(*own), [0] * ranks)
        assert new == []


def gathered(all_stragglers: list[Stragglers], iteration: int) -> list[list[Straggler]]:
    rows = [each.slots(iteration) for each in all_stragglers]
    most = [max(column) for column in zip(*rows, strict=True)]
    return [each.after(iteration, most) for each in all_stragglers]


def contexts(size: int) -> list[ParallelContext]:
    world, grid = ThreadWorld(size), ProcessGrid(dp=size)
    return [replace(thread_context(world, grid, rank), watch=SimpleNamespace()) for rank in range(size)]


def test_all_ranks_find_the_same_after_the_first_interval():
    ranks = [Stragglers(10, context) for context in contexts(3)]
    for iteration in range(1, 51):
        for number, each in enumerate(ranks):
            each.add(1.0, 0.01, Waited(0.1 if number == 1 else 0.6))
        results = gathered(ranks, iteration)
        assert results[0] == results[1] == results[2]
        # The first of five gatherings is not judged.
        assert [one.rank for one in results[0]] == ([1] if iteration == 40 else [])
        assert ranks[0].take_summary() == (
            {"own": pytest.approx([0.4, 0.4, 0.9]), "waited": pytest.approx([0.1, 0.6, 0.6])}
            if iteration % 10 == 0
            else None
        )
        assert ranks[0].take_summary() is None


def test_a_step_whose_waits_are_not_known_yet_is_counted_later():
    (one, other) = (Stragglers(1, context) for context in contexts(2))
    late = SimpleNamespace(seconds=None)
    one.add(1.0, 0.0, late)
    one.add(9.0, 0.0, None)
    assert one.slots(1)[:3] == [0.0, 0.0, 0.0]
    late.seconds = 0.25
    assert one.slots(2)[:3] == [0.75, 0.25, 0.0]
    assert other.after(2, [*one.slots(2), 0.5, 0.5, 0.0]) == []


def test_nothing_is_gathered_alone_or_when_it_is_off():
    assert Stragglers(1, solo_context()).slots(1) == []
    assert [Stragglers(None, each).slots(1) for each in contexts(2)] == [[], []]


SMALL = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --lr 1e-2 --mock-data "
    "--vocab-size 32 --micro-batch-size 1 --global-batch-size 2 --eval-iters 0 --log-interval 1 "
    "--train-iters 13 --straggler-interval 3"
)


def test_a_run_names_the_rank_whose_data_is_slow(tmp_path, monkeypatch, capsys):
    read, world, board = Feed.micro_batches, ThreadWorld(2, timeout=60), Notes()
    path = tmp_path / "metrics.jsonl"

    def slowly(self, *given):
        if self.spec.data_parallel_rank == 1:
            time.sleep(0.06)
        return read(self, *given)

    monkeypatch.setattr(Feed, "micro_batches", slowly)

    def rank(number: int) -> None:
        config = parse_config([*SMALL.split(), "--metrics-jsonl", str(path)], world_size=2).config
        context = thread_context(world, ProcessGrid(dp=2), number)
        watch = Watch(board, number, 2, WatchLimits(60.0), Spared())
        groups = {name: watched(group, watch) for name, group in context.groups.items()}
        pretrain_on(config, replace(context, groups=groups, watch=watch))
        watch.close()

    world.run(rank)
    said = [line for line in capsys.readouterr().out.splitlines() if "its peers' time" in line]
    assert len(said) == 1
    assert said[0].startswith("incident at iteration 12: slow rank: rank 1 takes ")
    assert "; reading data is what is slow, 6" in said[0]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    spread = {each["iteration"]: each["rank_seconds"] for each in records if "rank_seconds" in each}
    assert sorted(spread) == [4, 7, 10, 13]
    assert spread[7]["own"][2] - spread[7]["own"][0] > 0.05
    assert spread[7]["waited"][2] > 0.05


@over_table("stages", [[0] * 7, [0, 0, 1, 1, 2, 2, 3], [0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 1, 1]])
def test_peers_are_all_others_of_a_stage(stages):
    """What is compared with a rank's time is the median over its peers, found without a list for each."""
    draw = np.random.default_rng(1)
    own = draw.choice([0.1, 0.2, 0.3, 0.5], 7).tolist()
    for rank in range(7):
        slow = [9.0 if other == rank else time for other, time in enumerate(own)]
        (one,) = [each for each in found([times(*slow)] * 3, stages) if each.rank == rank]
        peers = [slow[other] for other in range(7) if other != rank and stages[other] == stages[rank]]
        others = [slow[other] for other in range(7) if other != rank]
        assert one.peers.own == pytest.approx(np.median(peers or others))


def test_many_ranks_are_compared_soon():
    """16,384 ranks took nine seconds of each rank at each comparison: all with all."""
    began = time.process_time()
    known, new = SlowRanks(), []
    for number in range(3):
        known, new = known.after(number, times(*[0.4] * 16383, 0.8), [rank // 1024 for rank in range(16384)])
    assert [one.rank for one in new] == [16383]
    assert time.process_time() - began < 3
