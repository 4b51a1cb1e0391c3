"""`megazero checkpoint extend-positions`: longer tables, and trainings that go on with sparse attention."""

from __future__ import annotations

import os

import pytest
import torch

from megazero.checkpoint.part import Key
from megazero.checkpoint.reader import CheckpointReader
from megazero.commands.checkpoint import main
from megazero.config.resolve import parse_config
from megazero.errors import CheckpointError
from megazero.mpu.launch import Launch
from megazero.train.pretraining import pretrain
from tests.commands.checkpoint.samples import SMALL, save

TABLE = Key("embedding.position.weight")
SPARSE = "--sparse-attention bigbird --sparse-block 4 --sparse-num-random-blocks 1"
LONG = f"--seq-length 40 --max-position-embeddings 40 --train-iters 2 {SPARSE}"


def train(*flags: str):
    """The state after a training with `SMALL` flags and further ones."""
    words = [*SMALL.split(), *" ".join(flags).split()]
    return pretrain(parse_config(words, world_size=1).config, Launch())


def test_a_dense_model_becomes_longer_and_sparse(run, tmp_path, capsys):
    out = tmp_path / "long"
    assert main(["extend-positions", str(run), str(out), "--max-position-embeddings", "40"]) == 0
    assert f"--load {out} --finetune\n  --max-position-embeddings 40" in capsys.readouterr().out
    before, after = CheckpointReader(run / "iter_0000004"), CheckpointReader(out / "iter_0000000")
    assert set(after.shapes) == {key for key in before.shapes if key.kind == "weight"}
    for key in after.shapes:
        expected = before.tensor(key)
        if key == TABLE:
            expected = expected.repeat(3, 1)[:40]
        assert torch.equal(after.tensor(key), expected)
    assert main(["verify", str(out)]) == 0
    with pytest.raises(CheckpointError, match="max_position_embeddings 40 .now 16."):
        train(f"--load {out} --finetune --save {tmp_path / 'c'}")
    assert train(f"--load {out} --finetune --save {tmp_path / 'sparse'} {LONG}").iteration == 2


def test_a_training_goes_on_with_the_layout_that_it_has(run, tmp_path):
    """A dense model may become sparse where a training begins; nothing else changes what a token sees."""
    sparse, other = tmp_path / "sparse", f"--save {tmp_path / 'other'} --train-iters 6"
    with pytest.raises(CheckpointError, match="sparse_attention dense .now bigbird."):
        train(f"--load {run} {other} {SPARSE}")
    assert train(f"--load {run} --finetune --save {sparse} {SPARSE}").iteration == 4
    with pytest.raises(CheckpointError, match="sparse_attention bigbird .now dense."):
        train(f"--load {sparse} --finetune {other}")
    with pytest.raises(CheckpointError, match="sparse_seed 1234 .now 5."):
        train(f"--load {sparse} {other} {SPARSE} --sparse-seed 5")
    longer = f"{other} {SPARSE} --override-opt_param-scheduler"
    assert train(f"--load {sparse} {longer}").iteration == 6


def test_a_sparse_model_has_no_form_in_transformers(run, tmp_path, capsys):
    sparse = tmp_path / "sparse"
    train(f"--load {run} --finetune --save {sparse} {SPARSE}")
    capsys.readouterr()
    assert main(["to-hf", str(sparse), str(tmp_path / "hf"), "--no-tokenizer"]) != 0
    assert "`sparse_attention` must be dense, but is bigbird" in capsys.readouterr().err


def test_a_model_of_transformers_becomes_sparse(run, tmp_path):
    """By `--load-hf`, too, where nothing is longer."""
    assert main(["to-hf", str(run), str(tmp_path / "hf"), "--no-tokenizer"]) == 0
    state = train(f"--load-hf {tmp_path / 'hf'} --save {tmp_path / 'a'} --train-iters 1 {SPARSE}")
    assert state.iteration == 1


def test_what_cannot_be_extended_is_refused(run, tmp_path, capsys):
    def refused(source, out, positions: int, status: int) -> str:
        argv = ["extend-positions", str(source), str(out), "--max-position-embeddings", str(positions)]
        assert main(argv) == status
        return capsys.readouterr().err

    assert "`--max-position-embeddings` must be above 16, but is 16" in refused(run, tmp_path / "b", 16, 2)
    assert "must hold no checkpoints" in refused(run, run, 40, 1)
    save(tmp_path / "plain")
    assert "must have learned positions, but has none" in refused(tmp_path / "plain", tmp_path / "b", 40, 1)
    assert not (tmp_path / "b").exists() or not os.listdir(tmp_path / "b")
