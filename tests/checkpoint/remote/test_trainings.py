"""Trainings whose checkpoints are at a URL: they go back to one, and fine-tune one, as on a disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megazero.config.resolve import parse_config
from megazero.mpu.context import solo_context
from megazero.train.pretraining import pretrain_on
from proofs.fault_matrix.runs import MODEL, spoiled, write_text
from tests.train.finetuning.samples import make_files, run, steps

URL = "s3://bucket/run"
SPIKE = "--global-batch-size 8 --train-iters 36 --save-interval 10 --spike-window 20 --on-spike rollback"


def train(text: str, save: str, metrics: Path) -> list[tuple]:
    """The iterations and losses of a training whose step 33 reads noise."""
    words = f"{MODEL} {SPIKE} --device cpu --data-path {text} --save {save} --metrics-jsonl {metrics}"
    with spoiled({}, range(8 * 32, 8 * 33)):
        pretrain_on(parse_config(words.split()).config, solo_context())
    lines = map(json.loads, metrics.read_text().splitlines())
    return [(line["iteration"], line["lm_loss"]) for line in lines]


@pytest.mark.slow
def test_a_training_goes_back_to_a_checkpoint_at_a_url(memory, another_host, tmp_path, capsys):
    text = write_text(tmp_path / "text")
    here = train(text, str(tmp_path / "run"), tmp_path / "here.jsonl")
    capsys.readouterr()
    assert train(text, URL, tmp_path / "there.jsonl") == here
    assert "went back to a checkpoint" in capsys.readouterr().out
    assert here[-1][0] == 36


@pytest.mark.slow
def test_a_checkpoint_at_a_url_is_fine_tuned(memory, another_host, tmp_path):
    files = make_files(tmp_path)
    for place in (str(tmp_path / "run"), URL):
        run(
            files, "gpt", "pairs", "--epochs", 1, "--save", place, "--metrics-jsonl", tmp_path / "first.jsonl"
        )
    another_host()
    found = []
    for place in (str(tmp_path / "run"), URL):
        flags = ("--epochs", 1, "--pretrained-checkpoint", place, "--seed", 5)
        run(files, "gpt", "pairs", *flags, "--metrics-jsonl", tmp_path / f"{len(found)}.jsonl")
        found.append(steps(tmp_path, f"{len(found)}.jsonl"))
    assert found[0] == found[1]
