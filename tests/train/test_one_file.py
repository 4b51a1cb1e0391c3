"""`examples_3d/one_file.py`, built by hand, equals `pretrain_gpt.py`: losses and weights, bit for bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples_3d.one_file import Run, train, write_corpus
from megazero.checkpoint.reader import CheckpointReader
from megazero.config.resolve import parse_config
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.pretraining import pretrain_on
from tests.proofs.test_walk import ROOT

SMALL = Run(layers=2, hidden=32, heads=4, length=16, micro_batch=2, global_batch=8, steps=3, warmup=1, zero=0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    prefix = tmp_path_factory.mktemp("corpus") / "docs"
    write_corpus(prefix)
    return prefix


def flags(run: Run, corpus: Path, folder: Path) -> list[str]:
    """The same training for `pretrain_gpt.py`."""
    return (
        f"--num-layers {run.layers} --hidden-size {run.hidden} --num-attention-heads {run.heads} "
        f"--seq-length {run.length} --hidden-dropout 0 --attention-dropout 0 "
        f"--micro-batch-size {run.micro_batch} --global-batch-size {run.global_batch} "
        f"--train-iters {run.steps} --lr {run.lr} --min-lr {run.min_lr} --lr-decay-style cosine "
        f"--lr-warmup-iters {run.warmup} --weight-decay {run.weight_decay} --adam-beta2 0.95 "
        f"--clip-grad {run.clip} --seed {run.seed} --tensor-model-parallel-size {run.tensor} "
        f"--pipeline-model-parallel-size {run.pipeline} --zero-stage {run.zero} --log-interval 1 "
        f"--tokenizer-type ByteLevelTokenizer --data-path {corpus} --split 1,0,0 --eval-iters 0 "
        f"--num-workers 0 --save {folder} --metrics-jsonl {folder}.jsonl"
    ).split()


def losses_of(metrics: Path) -> list[float]:
    records = map(json.loads, metrics.read_text().splitlines())
    return [record["lm_loss"] for record in records if "lm_loss" in record]


def tensors(folder: Path, run: Run) -> dict[str, torch.Tensor]:
    """Weights and moments of a checkpoint."""
    reader = CheckpointReader(folder / f"iter_{run.steps:07d}")
    return {str(key): reader.tensor(key) for key in reader.shapes if key.kind != "rng"}


def check_same(run: Run, by_hand: Path, folder: Path) -> None:
    ours, theirs = tensors(by_hand, run), tensors(folder, run)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, {}),
        (2, {"tensor": 2}),
        (2, {"pipeline": 2}),
        (2, {"zero": 1}),
        (2, {"zero": 3}),
        (4, {"tensor": 2, "pipeline": 2}),
    ],
)
def test_a_training_by_hand_is_the_run_that_the_configuration_makes(ranks, layout, corpus, tmp_path):
    run, world = replace(SMALL, **layout), ThreadWorld(ranks)
    grid = ProcessGrid.factor(ranks, tp=run.tensor, pp=run.pipeline)
    config = parse_config(flags(run, corpus, tmp_path / "run"), world_size=ranks).config

    def both(rank: int) -> list[float]:
        context = thread_context(world, grid, rank)
        pretrain_on(config, context)
        return train(run, corpus, context, str(tmp_path / "by_hand"))

    losses, *others = world.run(both)
    assert losses == losses_of(tmp_path / "run.jsonl")
    assert all(other == losses for other in others)
    check_same(run, tmp_path / "by_hand", tmp_path / "run")


def test_the_tour_shows_its_lines_and_it_stays_short():
    source = (ROOT / "examples_3d/one_file.py").read_text()
    lines = [line.strip() for line in source.splitlines()]
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/tour.md").read_text(), re.DOTALL)
    shown = [line.strip() for block in blocks for line in block.splitlines()]
    assert len(shown) > 5
    assert [line for line in shown if line not in lines] == []
    assert len(lines) <= 400


@pytest.mark.slow
def test_the_command_lines_train_the_same(corpus, tmp_path):
    run = Run(tensor=2, pipeline=2, steps=30)
    own = f"--tensor 2 --pipeline 2 --steps 30 --save {tmp_path / 'by_hand'}"
    lines = {
        "by_hand": ["examples_3d/one_file.py", *own.split()],
        "run": ["pretrain_gpt.py", *flags(run, corpus, tmp_path / "run")],
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    said = {}
    for name, line in lines.items():
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        done = subprocess.run([*start, *line], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        said[name] = done.stdout
    check_same(run, tmp_path / "by_hand", tmp_path / "run")
    assert f"loss {losses_of(tmp_path / 'run.jsonl')[-1]:.6f}" in said["by_hand"]
