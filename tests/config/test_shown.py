"""`--check-config` shows what the settings come to, and a file of it means the same."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from megazero.config.derive import data_parallel_size
from megazero.config.resolve import parse_config, resolve_or_exit
from megazero.config.shown import shown_config
from megazero.config.training_plan import training_plan_of

LLAMA = shlex.split(
    "--num-layers 4 --hidden-size 768 --num-attention-heads 12 --seq-length 128 --micro-batch-size 2 "
    "--swiglu "
    "--disable-bias-linear --lr 1e-3 --train-samples 1000 --lr-warmup-fraction 0.1 --data-path d "
    "--tensor-model-parallel-size 2 --vocab-size 50257"
)


def test_a_fine_tuning_is_shown_without_the_length_that_its_files_give() -> None:
    words = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
        "--lr 1e-3"
    )
    task = "--task SST-2 --train-data t.tsv --tokenizer-type ByteLevelTokenizer"
    text = shown_config(parse_config(shlex.split(f"{words} {task}"), world_size=3).config, 3)
    facts = [line for line in text.splitlines() if line.startswith("#")]
    assert facts == ["# world size 3: tensor 1 x pipeline 1 x context 1 x data parallel 3"]
    tree = yaml.safe_load(text)
    assert tree["finetune"]["task"] == "SST-2"
    assert tree["batch"]["global_batch_size"] == 6
    assert tree["training"]["train_iters"] is None


def test_what_follows_from_other_settings_is_shown_by_hand() -> None:
    text = shown_config(parse_config(LLAMA, world_size=6).config, 6)
    facts = [line for line in text.splitlines() if line.startswith("#")]
    assert facts == [
        "# world size 6: tensor 2 x pipeline 1 x context 1 x data parallel 3",
        "# one step: 6 samples; micro-batches on each replica: 1",
        "# the training: 166 iterations, 996 samples, 127488 tokens",
        "# learning rate: warmup over 100 samples, decay until 1000 samples",
        "# vocabulary: 50432 rows, padded from 50257",
    ]
    tree = yaml.safe_load(text)
    model = {name: tree["model"][name] for name in ("ffn_hidden_size", "num_query_groups", "kv_channels")}
    assert model == {"ffn_hidden_size": 2048, "num_query_groups": 12, "kv_channels": 64}
    assert tree["model"]["max_position_embeddings"] == 128
    assert tree["batch"]["global_batch_size"] == 6
    assert tree["optimizer"]["lr_decay_samples"] == 1000
    assert tree["parallel"]["pipeline_schedule"] == "1f1b"


def test_a_ramp_and_a_warmup_in_another_unit_are_shown() -> None:
    flags = "--global-batch-size 12 --rampup-batch-size 6 2 100 --lr-decay-tokens 50000"
    lines = shown_config(parse_config([*LLAMA, *flags.split()], world_size=2).config, 2).splitlines()
    assert lines[1] == (
        "# one step: 12 samples; micro-batches on each replica: 6; a ramp starts at 6 samples"
    )
    assert lines[3] == "# learning rate: warmup over 100 samples, decay until 50000 tokens"


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--global-batch-size 12 --rampup-batch-size 6 6 100",
        "--lr-decay-tokens 50000",
        "--train-tokens 40000 --lr-decay-style WSD --lr-wsd-decay-samples 20",
        "--save c --save-interval 5 --save-retain-interval 10",
        "--num-query-groups 4 --group-query-attention --ffn-hidden-size 640",
        "--pipeline-model-parallel-size 3 --num-layers-per-virtual-pipeline-stage 1 --num-layers 6 "
        "--global-batch-size 6",
        "--vocab-file v --merge-file m",
    ],
)
def test_a_file_of_it_means_the_same(flags: str, tmp_path: Path) -> None:
    config = parse_config([*LLAMA, *shlex.split(flags)], world_size=6).config
    text = shown_config(config, 6)
    file = tmp_path / "run.yaml"
    file.write_text(text)
    again = parse_config(["--config", str(file)], world_size=6).config
    assert shown_config(again, 6) == text
    replicas = data_parallel_size(config, 6)
    first, second = training_plan_of(config, replicas), training_plan_of(again, replicas)
    assert (first.end, first.lr, first.evaluations) == (second.end, second.lr, second.evaluations)
    assert again.tokenizer == config.tokenizer
    assert again.model.ffn_size == config.model.ffn_size
    assert again.checkpoint.kept_last == config.checkpoint.kept_last


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        resolve_or_exit([*LLAMA, "--check-config"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.rstrip() == shown_config(parse_config(LLAMA).config, 2).rstrip()
