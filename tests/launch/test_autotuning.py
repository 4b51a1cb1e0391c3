"""`megazero launch --autotuning`: a search before the launch."""

from __future__ import annotations

import json

import pytest

from megazero.commands.launch import tune
from megazero.config.resolve import parse_config
from megazero.errors import ConfigError
from megazero.launch.flags import parse
from megazero.plan.autotuning import Autotuning

GPT = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 100 --mock-data "
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 3 --device cpu"
)


def test_the_script_is_started_in_the_best_layout(tmp_path):
    section = {"enabled": True, "tuner_num_trials": 2, "results_dir": str(tmp_path / "found")}
    path = tmp_path / "f.json"
    path.write_text(json.dumps({"autotuning": section}))
    flags = parse(
        [
            "--autotuning",
            "run",
            "pretrain_gpt.py",
            *GPT.split(),
            "--deepspeed",
            "--deepspeed_config",
            str(path),
        ]
    )
    assert tune(flags, 2) == 0
    assert flags.arguments == ["--config", str(tmp_path / "found/01.yaml")]
    assert parse_config(flags.arguments, world_size=2).config.model.hidden_size == 32


def test_models_of_ones_own_are_not_searched():
    with pytest.raises(ConfigError, match="must be pretrain_gpt.py or pretrain_bert.py with `--autotuning`"):
        tune(parse(["--autotuning", "tune", "train.py"]), 2)


def test_a_section_that_is_not_enabled_says_nothing(tmp_path):
    path = tmp_path / "f.json"
    for section in ({}, {"enabled": False, "tuner_num_trials": 3}, {"tuner_num_trials": 0}):
        path.write_text(json.dumps({"autotuning": section}))
        assert Autotuning.read(str(path)) == Autotuning()
