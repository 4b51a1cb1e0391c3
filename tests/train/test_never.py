"""Values that mean never in both Megatrons: 0, -1, and numbers that no run reaches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megazero.checkpoint.folder import saved_iterations
from megazero.config.resolve import parse_config
from megazero.errors import DataError
from megazero.mpu.launch import Launch
from megazero.train.pretraining import pretrain
from megazero.train.step.state import TrainState
from tests.data.corpora import write_lengths

SMALL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --vocab-size 60000 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --eval-iters 2 --log-interval 1"
)
NEVER = ("0", "100000000000000000000000", "1e23")


def run(flags: str, folder: Path) -> tuple[TrainState, list[int]]:
    """Train; returns where the training ended, and the iterations at which it evaluated."""
    metrics = folder / "metrics.jsonl"
    argv = f"{SMALL.replace('60000', '64')} --mock-data --metrics-jsonl {metrics} {flags}".split()
    state = pretrain(parse_config(argv, world_size=1).config, Launch())
    evaluated = metrics.with_suffix(".eval.jsonl")
    lines = evaluated.read_text().splitlines() if evaluated.exists() else []
    return state, [json.loads(line)["iteration"] for line in lines]


@pytest.mark.parametrize("never", NEVER)
def test_intervals_that_are_never_over(never: str, tmp_path: Path) -> None:
    flags = " ".join(f"--{name}-interval {never}" for name in ("save", "exit", "eval"))
    state, evaluated = run(f"--train-iters 3 --save {tmp_path} {flags}", tmp_path)
    assert state.iteration == 3
    assert evaluated == [3, 3]  # at the end, on validation and test data
    assert saved_iterations(tmp_path) == [3]


def test_a_run_without_evaluations(tmp_path: Path) -> None:
    state, evaluated = run("--train-iters 3 --eval-interval 1 --eval-iters -1", tmp_path)
    assert (state.iteration, evaluated) == (3, [])


def test_a_run_without_a_limit_of_time(tmp_path: Path) -> None:
    assert run("--train-iters 3 --exit-duration-in-mins 0", tmp_path)[0].iteration == 3


@pytest.mark.parametrize("length", ["--train-iters", "--train-samples", "--train-tokens"])
@pytest.mark.parametrize("more", ["", "--rampup-batch-size 2 2 4", "--eval-interval 1 --eval-iters 50"])
def test_a_training_without_an_end(length: str, more: str, tmp_path: Path) -> None:
    unit = length.removeprefix("--train-")
    flags = f"{length} {10**23} --lr-decay-{unit} 1e23 --exit-interval 2 --save {tmp_path} {more}"
    assert run(flags, tmp_path)[0].iteration == 2
    state, _ = run(f"{flags} --load {tmp_path}", tmp_path)
    assert state.iteration == 4


def test_an_index_for_endless_epochs_is_refused_with_what_it_takes(tmp_path: Path) -> None:
    prefix = write_lengths(tmp_path / "corpus", [50] * 400)
    argv = f"{SMALL} --data-path {prefix} --train-iters 1e23 --exit-interval 2".split()
    with pytest.raises(
        DataError, match=r"must fit into memory as an index, but [\d,]+ samples .* TiB; train"
    ):
        pretrain(parse_config(argv, world_size=1).config, Launch())
