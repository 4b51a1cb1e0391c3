"""`megazero checkpoint import-megatron`."""

from __future__ import annotations

import json

import pytest
import torch

from megazero.checkpoint.folder import iteration_folder, latest_iteration
from megazero.checkpoint.part import Key
from megazero.checkpoint.reader import CheckpointReader
from megazero.commands.checkpoint.megatron import main_import_megatron
from megazero.config.tree.model import ModelConfig
from tests.formats.megatron.samples import LLAMA, PADDED, VOCAB, Layout, random_weights, save_megatron

LAYOUT = Layout(2, 2, 2, arguments={"untie_embeddings_and_output_weights": True})


@pytest.fixture
def source(tmp_path):
    save_megatron(tmp_path / "in", LLAMA, random_weights(LLAMA), LAYOUT)
    return str(tmp_path / "in")


def test_it_writes_a_checkpoint(tmp_path, source, capsys):
    out = tmp_path / "out"
    flags = ["--trust-pickle", "--vocab-size", str(VOCAB), "--tokenizer-type", "NullTokenizer"]
    assert main_import_megatron([source, str(out), *flags]) == 0
    assert latest_iteration(out) == 0
    reader = CheckpointReader(iteration_folder(out, 0))
    expected = random_weights(LLAMA)
    assert {key.name for key in reader.shapes} == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(reader.tensor(Key(name)), tensor)
    facts = reader.facts
    assert ModelConfig.model_validate(facts["model"]) == LLAMA
    assert facts["tokenizer"]["tokenizer_type"] == "NullTokenizer"
    assert facts["vocab_size"] == VOCAB
    assert facts["converted_from"] == {
        "format": "Megatron-LM",
        "iteration": 100,
        "checkpoint_version": 3.0,
    }
    printed = capsys.readouterr().out
    assert f"{sum(t.numel() for t in expected.values()):,} parameters" in printed
    assert f"{VOCAB} of {PADDED} rows" in printed
    assert f"--load {out} --finetune" in printed


def test_it_needs_leave(tmp_path, source, capsys):
    assert main_import_megatron([source, str(tmp_path / "out"), "--vocab-size", str(VOCAB)]) == 2
    assert "error: `--trust-pickle` must be given" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_it_replaces_no_checkpoint(tmp_path, source, capsys):
    flags = [source, str(tmp_path / "out"), "--trust-pickle", "--vocab-size", str(VOCAB)]
    assert main_import_megatron(flags) == 0
    assert main_import_megatron(flags) == 1
    assert "must have no checkpoint yet, but has one of iteration 0" in capsys.readouterr().err


def test_arguments_from_a_file(tmp_path, source, capsys):
    flags = [source, str(tmp_path / "out"), "--trust-pickle", "--vocab-size", str(VOCAB), "--megatron-args"]
    path = tmp_path / "args.json"
    assert main_import_megatron([*flags, str(path)]) == 2
    assert "`--megatron-args` must be a JSON file" in capsys.readouterr().err
    path.write_text("[1]")
    assert main_import_megatron([*flags, str(path)]) == 2
    assert "must hold a JSON object" in capsys.readouterr().err
    path.write_text(json.dumps({"rotary_base": 2000}))
    assert main_import_megatron([*flags, str(path)]) == 0
    facts = CheckpointReader(iteration_folder(tmp_path / "out", 0)).facts
    assert facts["model"]["rotary_base"] == 2000.0


def test_a_tokenizer_that_is_none(tmp_path, source, capsys):
    flags = [source, str(tmp_path / "out"), "--trust-pickle", "--tokenizer-type", "Abacus"]
    assert main_import_megatron(flags) == 2
    assert "`tokenizer_type`" in capsys.readouterr().err


def test_help_tells_of_every_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        main_import_megatron(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--trust-pickle", "--vocab-size", "--megatron-args", "--average-replicas", "--inert-class"):
        assert flag in text
