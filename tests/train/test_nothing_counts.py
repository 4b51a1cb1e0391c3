"""A training whose data holds stretches in which nothing counts: it says so and goes on untouched."""

from __future__ import annotations

import json

import numpy as np

from megazero.config.resolve import parse_config
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.mpu.launch import Launch
from megazero.train.pretraining import pretrain

EOD = 15  # of a NullTokenizer for 15 numbers
SMALL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--global-batch-size 2 --train-iters 4 --lr 1e-2 --lr-warmup-iters 2 --lr-decay-style linear "
    "--tokenizer-type NullTokenizer --vocab-size 15 --eod-mask-loss --split 100,0,0 --eval-iters 0 "
    "--log-params-norm --log-interval 1"
)


def test_steps_pass_and_nothing_moves(tmp_path, capsys):
    with IndexedDatasetWriter(tmp_path / "ends", np.uint16) as writer:
        for _ in range(8):
            writer.add_document([np.full(9, EOD, dtype=np.uint16)])
    flags = ["--data-path", str(tmp_path / "ends"), "--metrics-jsonl", str(tmp_path / "m.jsonl")]
    state = pretrain(parse_config([*SMALL.split(), *flags], world_size=1).config, Launch())
    records = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert (state.iteration, state.consumed_samples, state.skipped) == (4, 8, 4)
    assert [r["consumed_samples"] for r in records] == [2, 4, 6, 8]
    assert {(r["lm_loss"], r["grad_norm"], r["skipped"]) for r in records} == {(None, 0.0, True)}
    assert len({(r["params_norm"], r["loss_scale"]) for r in records}) == 1
    assert {r["learning_rate"] for r in records} == {0.0}, "a schedule counts updates"
    out = capsys.readouterr().out
    assert out.count("update skipped, nothing in the global batch counts") == 4
    assert "lm loss" not in out
    assert "number of skipped iterations:   1 | number of nan iterations:   0" in out
