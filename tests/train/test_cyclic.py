"""A training with a cyclic order under laws 1 and 3: real data, several epochs, any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from megazero.config.resolve import parse_config
from megazero.data.blended import SampleDataset
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.build import build_engine
from megazero.train.parts.chunks import build_chunks
from megazero.train.parts.feeds import build_feeds
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.resume.resume import resume
from megazero.train.resume.snapshot import Snapshots
from megazero.train.step.timers import Timers

VOCABULARY = Vocabulary(64, 128, None, None)
EPOCH = 31  # samples; no number of batches fills it
STEPS = 6  # of 12 samples, so that the third epoch is under way at the end
MODEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 64 --lr 1e-2 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --adam-eps 1e-4 --split 8,1,1 --eval-iters 1 "
    "--eval-interval 3 --num-workers 0 --dataloader-type cyclic"
)


class Spy:
    """A dataset that notes which samples are read."""

    def __init__(self, dataset: SampleDataset):
        self.dataset = dataset
        self.read: list[list[int]] = []

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        self.read.append(indices.tolist())
        return self.dataset.batch(indices)


@dataclass(frozen=True)
class Seen:
    """What one rank saw: of each step the loss and the norm, of each micro-batch the samples."""

    losses: list[float]
    norms: list[float]
    samples: list[list[int]]
    evaluation: float | None
    epoch: int


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    """A dataset of 40 sequences of 8 tokens, of which 32 are for training."""
    prefix = tmp_path_factory.mktemp("data") / "text"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_raw(np.random.default_rng(3).integers(0, 64, 40 * 8), np.full(40, 8))
    return str(prefix)


def train(
    data: Sequence[str], ranks: int, micro: int, stop: int = STEPS, folder: Path | None = None, more: str = ""
) -> list[Seen]:
    """Train on so many replicas until iteration `stop`, from what `folder` holds, and save there."""
    flags = {"--global-batch-size": "12", "--train-iters": str(STEPS)}
    if "--train-samples" in more:
        del flags["--train-iters"]
    argv = [*MODEL.split(), "--data-path", *data, "--micro-batch-size", str(micro)]
    kept = f"--save {folder} --load {folder} --override-opt_param-scheduler"
    argv += [*(kept.split() if folder else []), *more.split()]
    argv += [word for flag, value in flags.items() if flag not in argv for word in (flag, value)]
    config = parse_config(argv, world_size=ranks).config
    world = ThreadWorld(ranks, 60.0)

    def work(rank: int) -> Seen:
        context = thread_context(world, ProcessGrid(dp=ranks), rank)

        def build(config, training_plan):
            return build_engine(config, training_plan, build_chunks(config, VOCABULARY, context), context)

        resumed = resume(config, context, VOCABULARY.size, build)
        state, training_plan, engine = resumed.state, resumed.training_plan, resumed.engine
        feeds = build_feeds(config, training_plan, VOCABULARY, context, resumed.stream_seed)
        spy = Spy(feeds.train.dataset)
        feed, losses, norms = replace(feeds.train, dataset=spy), [], []
        while state.iteration < stop:
            step = training_plan.at(state.progress)
            batches = feed.micro_batches(state.consumed_samples, step.micro_batches)
            result = engine.train_step(batches, state.progress, Timers())
            state = state.after(step, result.skipped)
            losses.append(result.losses.total)
            norms.append(result.grad_norm)
        if folder is not None:
            snapshots = Snapshots(
                config, training_plan, engine, context, VOCABULARY.size, resumed.stream_seed
            )
            snapshots.save(state)
            snapshots.saver.close()
        first = training_plan.evaluations.first_sample(state.iteration)
        evaluated = [feeds.valid.micro_batches(first, training_plan.evaluations.micro_batches)]
        evaluation = engine.evaluate(evaluated)[0].total
        return Seen(losses, norms, spy.read, evaluation, feed.spec.num_samples)

    return world.run(work)


def order(ranks: Sequence[Seen]) -> list[int]:
    """The samples in the training order."""
    micro_batches = zip(*(seen.samples for seen in ranks), strict=True)
    return list(chain.from_iterable(chain.from_iterable(micro_batches)))


@pytest.fixture(scope="module")
def alone(prefix) -> Seen:
    (seen,) = train([prefix], 1, 12)
    return seen


def test_each_epoch_holds_each_sample_once(alone):
    found = order([alone])
    assert alone.epoch == EPOCH
    assert len(found) == STEPS * 12
    for start in (0, EPOCH):
        assert sorted(found[start : start + EPOCH]) == list(range(EPOCH))
    assert found[:EPOCH] != found[EPOCH : 2 * EPOCH]
    assert len(set(found[2 * EPOCH :])) == STEPS * 12 - 2 * EPOCH


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (2, 6), (2, 1), (3, 2), (4, 3)])
def test_ranks_and_micro_batches_change_nothing(alone, prefix, ranks, micro):
    """Losses differed in the third digit."""
    for seen in (found := train([prefix], ranks, micro)):
        assert seen.losses == pytest.approx(alone.losses, rel=1e-5)
        assert seen.norms == pytest.approx(alone.norms, rel=1e-4)
        assert seen.evaluation == pytest.approx(alone.evaluation, rel=1e-5)
    assert order(found) == order([alone])
    assert len({round(loss, 4) for loss in alone.losses}) == STEPS, "other samples must give other losses"


def test_a_run_continues_on_any_number_of_ranks(alone, prefix, tmp_path):
    losses, evaluation, found = [], None, []
    for ranks, micro, stop in ((2, 3, 1), (3, 4, 2), (1, 12, 3), (4, 3, 5), (2, 2, 6)):
        seen = train([prefix], ranks, micro, stop, tmp_path / "run")
        losses, evaluation, found = losses + seen[0].losses, seen[0].evaluation, found + order(seen)
    assert losses == pytest.approx(alone.losses, rel=1e-5)
    assert evaluation == pytest.approx(alone.evaluation, rel=1e-5)
    assert found == order([alone])


def test_a_run_continues_with_other_batches(alone, prefix, tmp_path):
    """The epoch is the data; it was as long as the training, and so another one after such a change."""
    found = []
    for ranks, micro, stop, more in (
        (2, 3, 2, ""),
        (3, 1, 4, "--global-batch-size 6"),
        (1, 4, 8, "--global-batch-size 16 --rampup-batch-size 8 8 60 --train-iters 9"),
        (4, 1, 9, "--global-batch-size 4 --train-iters 100"),
    ):
        seen = train([prefix], ranks, micro, stop, tmp_path / "run", more)
        found += order(seen)
        assert {each.epoch for each in seen} == {EPOCH}
    assert len(found) > 2 * EPOCH
    assert found[: STEPS * 12] == order([alone])[: len(found)]


def test_a_weighted_blend_is_as_long_as_the_samples_asked_for(prefix):
    """Its epoch changes with the number of steps, but not where the length of the training is in samples."""
    epochs = {
        train(["1", prefix], 1, batch, 0, None, f"--train-samples 70 --global-batch-size {batch}")[0].epoch
        for batch in (12, 8)
    }
    assert epochs == {70}


def test_megatron_s_own_order_depends_on_the_ranks(prefix):
    """As its flag says."""
    one, two = (train([prefix], ranks, 3, 2, None, "--data-sharding") for ranks in (1, 2))
    assert {seen.epoch for seen in (*one, *two)} != {EPOCH}
    assert sorted(order(one)) != sorted(order(two))
    assert one[0].losses != pytest.approx(two[0].losses, rel=1e-4)
