"""A folder says what it is: a line may leave out what a checkpoint or a Hugging Face model says."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from megazero.config.resolve import parse_config
from megazero.config.rules.table import broken_rules
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.errors import CheckpointError, ConfigError
from megazero.formats.hf.architecture import as_told
from megazero.formats.hf.config_json import TokenIds, architecture_of, config_of, unlike
from megazero.formats.hf.convert import convert_to_hf
from megazero.formats.hf.phi3 import PHI3
from megazero.formats.hf.writer import ModelFiles, write_hf
from megazero.mpu.launch import Launch
from megazero.train.folders import read_folder
from megazero.train.pretraining import pretrain
from megazero.train.resume.saved import read_saved_model
from tests.config.samples import make_config
from tests.formats.hf.descendants import SAMPLES
from tests.formats.hf.samples import MODELS, VOCAB, random_weights
from tests.models.pairs.hf_t5 import t5_shape
from tests.source_tree import sources

LINE = "--micro-batch-size 1 --lr 1e-3 --train-iters 2 --mock-data"
SHAPES = {**MODELS, "t5": t5_shape(vocab_size=None, untie_embeddings_and_output_weights=False)}


def resolve(words: str):
    return parse_config(f"{words} {LINE}".split(), world_size=1, reader=read_folder)


def refusal(words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(words)
    return caught.value.violations


def described(folder: Path, name: str) -> Path:
    """A folder with nothing but the `config.json` of a model."""
    folder.mkdir()
    model = SHAPES[name]
    config = config_of(architecture_of(model), model, 61, TokenIds(), "float32")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def saved(run: Path, model: dict[str, object], **facts: object) -> Path:
    """A run's folder with a checkpoint's `state.json`."""
    folder = run / "iter_0000002"
    folder.mkdir(parents=True)
    content = {"kind": "weights", "vocab_size": 64, "model": model, **facts}
    (folder / "state.json").write_text(json.dumps(content))
    (folder / "manifest.json").write_text("{}")
    return run


DENSE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 64}


def test_every_architecture_is_what_its_folder_says(tmp_path: Path) -> None:
    told = {n: m for n, m in SHAPES.items() if architecture_of(m).seen is as_told or n == "t5"}
    assert len(told) > 10
    for name, model in told.items():
        if name == "t5":  # whose tensors are asked for
            continue
        config = resolve(
            f"--load-hf {described(tmp_path / name, name)} --seq-length {model.seq_length}"
        ).config
        assert unlike(model, config.model) == [], name
        assert config.model.vocab_size == 61
        assert (config.model.hidden_dropout, config.model.seq_length) == (
            model.hidden_dropout,
            model.seq_length,
        )


def test_the_length_of_sequences_is_the_launch_s(tmp_path: Path) -> None:
    assert refusal(f"--load-hf {described(tmp_path / 'hf', 'llama')}") == [
        "`--seq-length` must be set (training sequence length), but is missing."
    ]


def test_what_a_line_says_otherwise_is_named_and_nothing_else(tmp_path: Path) -> None:
    folder = described(tmp_path / "hf", "llama")
    place = f"{folder / 'config.json'}"
    assert refusal(f"--load-hf {folder} --seq-length 8 --num-layers 3 --hidden-size 36 --vocab-size 60") == [
        f"`--num-layers` must be what {place} says, 2, but is 3; leave it out, or name another folder.",
        f"`--vocab-size` must be what {place} says, 61, but is 60; leave it out, or name another folder.",
    ]
    assert len(refusal(f"--load-hf {tmp_path / 'none'}")) == 1  # not one for each setting besides


def test_a_checkpoint_says_its_length_and_tokenizer_too(tmp_path: Path) -> None:
    words = tmp_path / "words" / "vocab.txt"
    tokenizer = {"tokenizer_type": "BertWordPieceCase", "vocab_file": str(words)}
    run = saved(tmp_path / "run", {**DENSE, "normalization": "RMSNorm"}, tokenizer=tokenizer)
    resolved = resolve(f"--load {run} --finetune --use-checkpoint-args")
    assert (resolved.config.model.normalization, resolved.config.model.seq_length) == ("RMSNorm", 16)
    assert resolved.config.tokenizer == TokenizerConfig(**tokenizer)
    assert any("as " in line and "--normalization RMSNorm" in line for line in resolved.warnings)
    assert resolve(f"--load {run} --seq-length 8 --hidden-dropout 0.3").config.model.seq_length == 8
    # A run records its model whole, and a shorter sequence leaves the table of positions as it is.
    whole = saved(tmp_path / "whole", resolved.config.model.model_dump(mode="json"))
    for words, positions in (("", None), (" --seq-length 8", 16), (" --seq-length 16", None)):
        assert resolve(f"--load {whole}{words}").config.model.max_position_embeddings == positions
    assert "max-position-embeddings` must be what" in refusal(f"--load {whole} --seq-length 32")[0]
    assert refusal(f"--load {run} --normalization LayerNorm")[0].startswith("`--normalization` must be what")
    other = resolve(f"--load {run} --tokenizer-type NullTokenizer")
    assert other.config.tokenizer.vocab_file is None
    assert any("the tokenizer is that of the launch" in line for line in other.warnings)


def test_a_run_without_a_checkpoint_yet_begins_from_the_other_folder(tmp_path: Path) -> None:
    folder = described(tmp_path / "hf", "gpt2")
    assert (
        resolve(f"--load {tmp_path / 'new'} --load-hf {folder} --seq-length 8").config.model.num_layers == 2
    )
    run = saved(tmp_path / "new", {**DENSE, "num_layers": 5})
    assert resolve(f"--load {run} --load-hf {folder}").config.model.num_layers == 5
    (run / "iter_0000002" / "state.json").write_text("{")  # damaged: the run says so
    assert resolve(f"--load {run} --load-hf {folder} --seq-length 8").config.model.num_layers == 2


def test_what_a_line_says_in_another_way_is_not_said_twice(tmp_path: Path) -> None:
    sparse = {**DENSE, "num_experts": [4], "expert_interval": 1}
    run = saved(tmp_path / "run", sparse)
    assert resolve(f"--load {run} --moe-layer-freq 1").config.model.expert_interval is None
    assert refusal(f"--load {run} --moe-layer-freq 2")[0].startswith("`--num-experts` must be what")
    pair = {**DENSE, "family": "t5", "num_layers": 5, "t5_encoder_layers": 2, "t5_decoder_layers": 3}
    run = saved(tmp_path / "pair", pair)
    both = resolve(f"--load {run} --num-layers 2").config.model
    assert (both.num_layers, both.t5_decoder_layers) == (5, 3)
    (only,) = refusal(f"--load {run} --num-layers 3")
    assert only.startswith("`--encoder-num-layers` must be what")
    assert ", 2, but is 3;" in only


def test_experts_may_be_added_to_a_dense_folder(tmp_path: Path) -> None:
    folder = described(tmp_path / "hf", "llama")
    line = f"--load-hf {folder} --seq-length 8 --num-experts 4 --moe-use-upcycling"
    assert resolve(line).config.model.num_experts == (4,)


def test_tokenizer_files_are_named_wherever_one_works(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "vocab.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    section = TokenizerConfig(tokenizer_type="BertWordPieceCase", vocab_file="vocab.txt")
    assert section.located().vocab_file == str(tmp_path / "vocab.txt")
    # Saved elsewhere by an earlier version, or on another machine: found beside the checkpoint.
    lost = {"tokenizer_type": "BertWordPieceCase", "vocab_file": "/nowhere/vocab.txt"}
    facts = {"kind": "weights", "vocab_size": 64, "model": DENSE, "tokenizer": lost}
    folder = tmp_path / "iter_0000002"
    assert read_saved_model(facts, folder).tokenizer().vocab_file == str(tmp_path / "vocab.txt")
    assert read_saved_model(facts, folder / "deep" / "er").tokenizer().vocab_file == "/nowhere/vocab.txt"
    hub = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model="owner/name")
    assert hub.located() == hub


def test_a_folder_that_says_nothing_is_refused(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", DENSE)
    facts = json.loads((run / "iter_0000002" / "state.json").read_text())
    with pytest.raises(CheckpointError, match="must say which model it holds"):
        read_saved_model({**facts, "model": None}, run)


def test_all_commands_ask_the_same_function() -> None:
    """Every reading of a training's line says by what its folders are read."""
    calls = [
        (source.module, node)
        for source in sources("megazero")
        if not source.module.startswith("megazero.config") and "parse_config" in source.text
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("parse_config", "resolve_or_exit")
    ]
    assert len(calls) > 6
    lacking = [m for m, call in calls if "reader" not in {keyword.arg for keyword in call.keywords}]
    assert lacking == []


@pytest.mark.parametrize("size", ["hpz_partition_size", "node_size"])
def test_replicas_of_a_node_count_ranks_that_share_sequences(size: str) -> None:
    given = {"zero.stage": 3, "parallel.context_parallel_size": 2, f"zero.{size}": 2}
    given |= {"zero.quantized_gradients": "int8"} if size == "node_size" else {}
    assert broken_rules(make_config(given), 2) == []
    assert f"{size.removesuffix('_partition_size')}_divides_data_parallel" in broken_rules(
        make_config({**given, f"zero.{size}": 3}), 2
    )


def test_a_model_keeps_the_class_that_it_had_through_training(tmp_path: Path) -> None:
    source = random_weights(SAMPLES["phi3"].ours)
    write_hf(source, SAMPLES["phi3"].ours, VOCAB, tmp_path / "hf", extras=ModelFiles(architecture=PHI3.name))
    words = f"--load-hf {tmp_path / 'hf'} --seq-length 8 --global-batch-size 1 --save {tmp_path / 'run'}"
    pretrain(resolve(words).config, Launch())
    goes_on = f"--load {tmp_path / 'run'} --finetune --global-batch-size 1 --save {tmp_path / 'on'}"
    pretrain(resolve(goes_on).config, Launch())
    exported, _ = convert_to_hf(tmp_path / "on", tmp_path / "out")
    assert exported.architecture == PHI3.name
