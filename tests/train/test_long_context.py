"""Trainings on packed documents, and at more tokens from a checkpoint of shorter ones."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from megazero.config.resolve import parse_config
from megazero.config.training_plan import training_plan_of
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.errors import CheckpointError, ConfigError
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.launch import Launch
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.parts.feeds import build_feeds
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.pretraining import pretrain
from tests.train.test_cyclic import order as samples
from tests.train.test_cyclic import train

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 64 --lr 1e-2 --train-iters 6 "
    "--micro-batch-size 2 --global-batch-size 4 --eval-iters 0 --split 8,2,0 --hidden-dropout 0 "
    "--attention-dropout 0 --num-workers 0 --tokenizer-type NullTokenizer"
)
SHORT = f"{MODEL} --seq-length 16 --position-embedding-type rope"
PACKED = f"{SHORT} --pack best-fit --reset-attention-mask"
LONG = (
    f"{MODEL} --seq-length 64 --position-embedding-type yarn --rotary-scaling-factor 4 "
    "--yarn-original-max-position-embeddings 16"
)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    """Documents of 2 to 40 tokens."""
    prefix = tmp_path_factory.mktemp("data") / "text"
    rng = np.random.default_rng(3)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in rng.integers(2, 41, 100).tolist():
            writer.add_document([rng.integers(0, 64, length)])
    return str(prefix)


@pytest.fixture(scope="module")
def short(prefix, tmp_path_factory) -> Path:
    """The checkpoint of a training at 16 tokens."""
    folder = tmp_path_factory.mktemp("short")
    run(folder, SHORT, "--data-path", prefix, "--save", folder / "run")
    return folder / "run"


def run(folder: Path, *flags: object) -> list[dict]:
    """Train in this process; the metrics of every iteration."""
    metrics = folder / "metrics.jsonl"
    argv = [word for part in ("--metrics-jsonl", metrics, *flags) for word in str(part).split()]
    pretrain(parse_config(argv, world_size=1).config, Launch())
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def losses(steps: list[dict]) -> list[float]:
    return [step["lm_loss"] for step in steps]


def test_a_packed_training_says_what_it_costs_and_goes_on_bit_for_bit(prefix, tmp_path, capsys):
    data = (PACKED, "--data-path", prefix)
    whole = run(tmp_path, *data)
    assert "is packed: 80 documents in " in capsys.readouterr().out
    again = (*data, "--save", tmp_path / "run", "--load", tmp_path / "run")
    (tmp_path / "again").mkdir()
    run(tmp_path / "again", *again, "--exit-interval", 2)
    assert losses(run(tmp_path / "again", *again)) == losses(whole)
    unpacked = run(tmp_path / "again", SHORT, "--data-path", prefix)
    assert losses(unpacked[-6:]) != losses(whole)


@pytest.mark.parametrize("order", ["single", "cyclic"])
def test_ranks_and_micro_batches_change_nothing_of_a_packed_training(prefix, order):
    """Traps 29 and 30: padding and last tokens leave ranks with other numbers of positions that count."""
    more = f"--pack best-fit --reset-attention-mask --dataloader-type {order}"
    (alone,) = train([prefix], 1, 12, more=more)
    spread = train([prefix], 3, 2, more=more)
    np.testing.assert_allclose(spread[0].losses, alone.losses, rtol=1e-5)
    np.testing.assert_allclose(spread[0].norms, alone.norms, rtol=1e-5)
    assert sorted(samples(spread)) == sorted(samples([alone]))


def test_a_packed_training_needs_documents_and_none_that_are_made_up(prefix):
    for flags, words in (
        (
            f"{SHORT} --pack best-fit --data-path {prefix}",
            "must be on with `pack` best-fit.*have nothing to do with",
        ),
        (f"{PACKED} --mock-data", "`mock_data` must be off with `pack` best-fit"),
        (f"{SHORT} --pack worst-fit --reset-attention-mask --data-path {prefix}", "best-fit"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_config(flags.split(), world_size=1)


@pytest.mark.parametrize("pack", [SHORT, PACKED], ids=["end to end", "packed"])
@pytest.mark.parametrize("cp", [2, 4])
def test_samples_do_not_depend_on_how_many_ranks_share_a_sequence(prefix, pack, cp):
    """Trap 52: dealt by another group than the replicas, samples come twice or never."""
    config = parse_config([*pack.split(), "--data-path", prefix], world_size=1).config
    vocabulary = Vocabulary(64, 128, None, None)

    def dealt(grid: ProcessGrid) -> list[list[int]]:
        """The samples of each rank's first three micro-batches."""
        world = ThreadWorld(grid.world_size)

        def rank(number: int) -> list[int]:
            context = solo_context() if grid.world_size == 1 else thread_context(world, grid, number)
            plan = training_plan_of(config, context.data.size)
            feed = build_feeds(config, plan, vocabulary, context, 1).train
            starts = [i * feed.spec.stride for i in range(3)]
            return list(chain.from_iterable(feed.sampler.at(start).tolist() for start in starts))

        return world.run(rank)

    without, shared = dealt(ProcessGrid(dp=2)), dealt(ProcessGrid(dp=2, cp=cp))
    assert shared == [samples for samples in without for _ in range(cp)]
    assert sorted(chain.from_iterable(without)) == list(range(12))
    assert dealt(ProcessGrid(cp=cp)) == dealt(ProcessGrid()) * cp


def test_a_longer_context_is_a_choice(short, prefix, tmp_path, capsys):
    start = (LONG, "--data-path", prefix, "--load", short, "--finetune")
    refusal = (
        r"position_embedding_type rope \(now yarn\).*max_position_embeddings 16 \(now 64\)"
        r"|max_position_embeddings 16 \(now 64\).*position_embedding_type rope \(now yarn\)"
    )
    with pytest.raises(CheckpointError, match=refusal):
        run(tmp_path, *start)
    steps = run(tmp_path, *start, "--extend-context", "--save", tmp_path / "run")
    assert f"loaded {short}" in capsys.readouterr().out
    assert steps[0]["iteration"] == 1
    assert steps[0]["lm_loss"] < np.log(64) + 1
    # The checkpoint that came out is of the longer model, and is no other's without the choice.
    (tmp_path / "on").mkdir()
    run(tmp_path / "on", LONG, "--data-path", prefix, "--load", tmp_path / "run", "--exit-interval", 1)
    with pytest.raises(CheckpointError, match=r"position_embedding_type yarn \(now rope\)"):
        run(tmp_path, SHORT, "--data-path", prefix, "--load", tmp_path / "run")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--yarn-original-max-position-embeddings 32", r"first training of `.*` \(16\), but is 32"),
        ("--hidden-size 64", r"hidden_size 32 \(now 64\)"),
        ("--rotary-percent 0.5", r"rotary_percent 1.0 \(now 0.5\)"),
    ],
)
def test_what_a_longer_context_may_not_change(short, prefix, tmp_path, flags, words):
    given = (LONG, flags, "--data-path", prefix, "--load", short, "--finetune", "--extend-context")
    with pytest.raises(CheckpointError, match=words):
        run(tmp_path, *given)


def test_learned_positions_cannot_be_scaled(prefix, tmp_path):
    learned = f"{MODEL} --seq-length 16 --data-path {prefix}"
    run(tmp_path, learned, "--save", tmp_path / "run", "--exit-interval", 1)
    start = (LONG, "--data-path", prefix, "--load", tmp_path / "run", "--finetune", "--extend-context")
    with pytest.raises(CheckpointError, match=r"position_embedding_type learned_absolute \(now yarn\)"):
        run(tmp_path, *start)
    with pytest.raises(ConfigError, match=r"with `extend_context`.*other positions cannot be scaled"):
        parse_config([*learned.split(), "--load", "x", "--extend-context"], world_size=1)
