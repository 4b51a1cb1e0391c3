"""Between checkpoints and folders of transformers: weights, settings, tokenizer, and the commands."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.folder import iteration_folder, latest_iteration
from megazero.checkpoint.part import Key
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.tensor_file import Later
from megazero.checkpoint.writer import write_checkpoint
from megazero.commands.checkpoint.hf import main_from_hf, main_to_hf, parse_size
from megazero.config.resolve import parse_config
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.errors import CheckpointError, ConfigError, DataError
from megazero.formats.hf.config_json import TokenIds, differences
from megazero.formats.hf.convert import convert_from_hf, convert_to_hf
from megazero.formats.hf.tokenizer_files import tokenizer_files, tokenizer_settings
from tests.formats.hf.model_flags import model_flags
from tests.formats.hf.samples import (
    GPT2,
    LLAMA,
    MODELS,
    VOCAB,
    config_for,
    random_weights,
    their_tensors,
    write_folder,
)
from tests.formats.hf.test_writer import loaded
from tests.source_tree import ROOT
from tests.tables import over_table

TEXTS = (
    "import sys\n\n\ndef main():\n\treturn 1\n",
    " two  blanks   at the end  ",
    "na\u00efve \ufb01 \u2603 \u65e5\u672c\u8a9e \U0001f600",
    "a b\u00a0c",
)


@over_table("dtype", [torch.float32, torch.bfloat16])
@over_table("name", MODELS)
def test_there_and_back_is_bit_equal(name, dtype, tmp_path):
    config = config_for(MODELS[name], torch_dtype=str(dtype).removeprefix("torch."), eos_token_id=[2, 3])
    tensors = their_tensors(MODELS[name], dtype)
    write_folder(tmp_path / "hf", config, tensors)
    imported = convert_from_hf(tmp_path / "hf", tmp_path / "run")
    assert imported.folder == iteration_folder(tmp_path / "run", 0)
    assert latest_iteration(tmp_path / "run") == 0
    ours = random_weights(MODELS[name]).tensors
    reader = CheckpointReader(imported.folder)
    assert reader.shapes == {key: tuple(tensor.shape) for key, tensor in ours.items()}
    assert all(torch.equal(reader.tensor(key), tensor) for key, tensor in ours.items())
    assert imported.parameters == sum(tensor.numel() for tensor in ours.values())

    exported, _ = convert_to_hf(tmp_path / "run", tmp_path / "back", dtype=dtype, max_shard_bytes=20_000)
    back = loaded(tmp_path / "back")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[key], tensors[key]) for key in tensors)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    assert exported.parameters == imported.parameters


def test_a_converted_checkpoint_says_which_model_it_is(tmp_path):
    write_folder(tmp_path / "hf", config_for(LLAMA), their_tensors(LLAMA))
    convert_from_hf(tmp_path / "hf", tmp_path / "run")
    facts = CheckpointReader(iteration_folder(tmp_path / "run", 0)).facts
    assert (facts["kind"], facts["vocab_size"]) == ("weights", VOCAB)
    assert differences(ModelConfig.model_validate(facts["model"]), LLAMA) == []
    assert facts["model"]["vocab_size"] == VOCAB
    assert facts["tokenizer"]["tokenizer_type"] is None
    assert facts["token_ids"] == {"bos": 1, "eos": 2, "pad": None}


def save_as_trained(
    folder: Path, model: ModelConfig, tokenizer: TokenizerConfig, weights=None, **facts
) -> Path:
    """Write a checkpoint as a training run does, with these weights or random ones."""
    weights = weights or random_weights(model).tensors
    saved = {
        "kind": "pretraining",
        "vocab_size": VOCAB,
        "config": {"model": model.model_dump(mode="json"), "tokenizer": tokenizer.model_dump(mode="json")},
        **facts,
    }
    laters = [(key, Later(t.dtype, tuple(t.shape), lambda t=t: t)) for key, t in weights.items()]
    moment = torch.ones(36)
    laters.append((Key("final_norm.weight", "exp_avg"), Later(moment.dtype, (36,), lambda: moment)))
    return write_checkpoint(folder, 40, laters, saved)


def test_a_trained_checkpoint_is_exported_with_its_tokenizer(tmp_path, bpe):
    section = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(bpe / "tokenizer.json"))
    folder = save_as_trained(tmp_path / "run", LLAMA, section)
    exported, remark = convert_to_hf(folder, tmp_path / "out")
    assert remark is None
    assert dict(exported.files).keys() >= {"tokenizer.json", "tokenizer_config.json"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == 0
    assert config["vocab_size"] == VOCAB


def test_a_lost_tokenizer_is_named_with_the_way_out(tmp_path, bpe):
    section = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model="gone.json")
    folder = save_as_trained(tmp_path / "run", LLAMA, section)
    with pytest.raises(DataError, match=r"gone.json is not there(.|\n)*--no-tokenizer"):
        convert_to_hf(folder, tmp_path / "out")
    assert main_to_hf([str(folder), str(tmp_path / "out"), "--no-tokenizer"]) == 0
    flags = ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", str(bpe)]
    assert main_to_hf([str(folder), str(tmp_path / "out2"), *flags]) == 0
    assert (tmp_path / "out2" / "tokenizer.json").exists()


@over_table(
    "facts",
    [{"config": {}}, {"config": {"model": {"num_layers": 0}}}, {"vocab_size": None}, {"token_ids": [1]}],
)
def test_facts_that_describe_no_model_are_refused(facts, tmp_path):
    folder = save_as_trained(tmp_path / "run", LLAMA, TokenizerConfig(), **facts)
    with pytest.raises(CheckpointError, match="must say which model it is of"):
        convert_to_hf(folder, tmp_path / "out")


def test_a_folder_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="must hold a checkpoint, but has none"):
        convert_to_hf(tmp_path, tmp_path / "out")


def test_a_run_is_not_overwritten(tmp_path):
    write_folder(tmp_path / "hf", config_for(GPT2), their_tensors(GPT2))
    convert_from_hf(tmp_path / "hf", tmp_path / "run")
    with pytest.raises(CheckpointError, match="must hold no checkpoints"):
        convert_from_hf(tmp_path / "hf", tmp_path / "run")


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Path:
    """A byte-level BPE as tokenizer.json, and as vocab.json and merges.txt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("bpe")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    return folder


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> dict[str, str]:
    """SentencePiece models: one like Llama's, and two others."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("pieces")
    (folder / "text").write_text(Path(__file__).read_text())
    faithful = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    kinds = {
        "llama": {"model_type": "bpe", **faithful},
        "normalizing": {"model_type": "bpe"},
        "unigram": {"model_type": "unigram", **faithful},
        "user-defined": {"model_type": "bpe", "user_defined_symbols": ["def"], **faithful},
    }
    for name, kind in kinds.items():
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "text"),
            model_prefix=str(folder / name),
            vocab_size=420,
            byte_fallback=True,
            minloglevel=2,
            **kind,
        )
    return {name: str(folder / f"{name}.model") for name in kinds}


def sections(bpe: Path, pieces: dict[str, str]) -> dict[str, TokenizerConfig]:
    return {
        "gpt2": TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(bpe / "vocab.json"),
            merge_file=str(bpe / "merges.txt"),
        ),
        "file": TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(bpe / "tokenizer.json")),
        "folder": TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(bpe)),
        "pieces": TokenizerConfig(
            tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=pieces["llama"]
        ),
    }


@over_table("model_type", ["gpt2", "llama"])
@over_table("name", ["gpt2", "file", "folder", "pieces"])
def test_transformers_reads_the_tokenizer_and_gives_the_same_ids(name, model_type, bpe, pieces, tmp_path):
    transformers = pytest.importorskip("transformers")
    section = sections(bpe, pieces)[name]
    found = tokenizer_files(section, None, 128)
    for file, content in (*found.files, ("config.json", json.dumps({"model_type": model_type}).encode())):
        (tmp_path / file).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    spec = (section.tokenizer_type, section.vocab_file, section.merge_file, section.tokenizer_model)
    ours = build_tokenizer(TokenizerSpec(*spec))
    assert found.remark is None
    assert (theirs.eos_token_id, len(theirs), theirs.model_max_length) == (ours.eod, ours.vocab_size, 128)
    assert found.tokens.eos == ours.eod
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    # And back: what was written is found and read again.
    again = TokenizerConfig(**tokenizer_settings(tmp_path, 400))
    spec = (again.tokenizer_type, again.vocab_file, again.merge_file, again.tokenizer_model)
    assert build_tokenizer(TokenizerSpec(*spec)).encode(TEXTS[0]) == ours.encode(TEXTS[0])


def test_what_came_with_a_tokenizer_goes_with_it(bpe, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "x": 1}')
    (tmp_path / "chat_template.jinja").write_text("{{ x }}")
    (tmp_path / "model.safetensors").write_text("")
    section = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(tmp_path))
    files = dict(tokenizer_files(section, None, 128).files)
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert files["tokenizer_config.json"] == (tmp_path / "tokenizer_config.json").read_bytes()


@pytest.mark.parametrize("name", ["normalizing", "unigram", "user-defined"])
def test_a_sentencepiece_model_of_another_kind_is_not_written(name, pieces):
    section = TokenizerConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=pieces[name])
    found = tokenizer_files(section, None, 128)
    assert (found.files, found.tokens) == ((), TokenIds(1, 2))
    assert found.remark == "transformers has nothing that gives the ids of this GPTSentencePieceTokenizer"


@over_table(
    ("section", "remark"),
    [
        (TokenizerConfig(), "the run had no tokenizer"),
        (TokenizerConfig(tokenizer_type="ByteLevelTokenizer"), "transformers has nothing that gives the ids"),
        (TokenizerConfig(tokenizer_type="NullTokenizer"), "transformers has nothing that gives the ids"),
    ],
)
def test_a_tokenizer_without_counterpart_is_left_out_and_said_so(section, remark):
    found = tokenizer_files(section, 100, 128)
    assert found.files == ()
    assert found.remark.startswith(remark)


@over_table(
    ("names", "kind"),
    [
        (("tokenizer.json", "vocab.json", "merges.txt"), "HFTokenizer"),
        (("vocab.json", "merges.txt", "tokenizer.model"), "GPT2BPETokenizer"),
        (("tokenizer.model", "vocab.json"), "GPTSentencePieceTokenizer"),
        (("vocab.json",), None),
    ],
)
def test_the_tokenizer_of_a_folder_is_found(names, kind, tmp_path):
    for name in names:
        (tmp_path / name).write_text("")
    assert TokenizerConfig(**tokenizer_settings(tmp_path, 400)).tokenizer_type == kind


@over_table(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500 MiB", 500 << 20), ("7", 7), ("7b", 7), ("3kb", 3000), ("2GiB", 2 << 30)],
)
def test_sizes_are_read_as_transformers_writes_them(text, size):
    assert parse_size(text) == size


@over_table("text", ["", "GB", "-1GB", "0", "1.5GB", "5TB", "9" * 40])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="`--max-shard-size` must be a size"):
        parse_size(text)


@over_table("name", MODELS)
def test_the_flags_that_are_printed_make_the_model(name):
    model = MODELS[name].model_copy(update={"vocab_size": VOCAB})
    flags = [word for line in model_flags(model) for word in line.split()]
    flags += ["--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "1", "--mock-data"]
    assert parse_config(flags).config.model == model


def test_the_flags_name_gelu_where_there_are_no_biases():
    # There the default is the exact form, with biases the tanh form.
    for activation in ("gelu", "gelu_exact"):
        model = GPT2.model_copy(update={"add_bias_linear": False, "activation": activation})
        flags = [word for line in model_flags(model) for word in line.split()]
        flags += ["--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "1", "--mock-data"]
        flags += ["--vocab-size", str(VOCAB)]
        assert parse_config(flags).config.model == model.model_copy(update={"vocab_size": VOCAB})


def test_the_commands_say_what_they_wrote_and_how_to_go_on(tmp_path, capsys, bpe):
    write_folder(tmp_path / "hf", config_for(GPT2), their_tensors(GPT2))
    (tmp_path / "hf" / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    assert main_from_hf([str(tmp_path / "hf"), run]) == 0
    said = capsys.readouterr().out
    assert "GPT2LMHeadModel: 28 tensors, 33,076 parameters, written to" in said
    assert "tokenizer: HFTokenizer" in said
    assert f"--load {run} --finetune` and the flags of data, length and optimizer" in said
    assert main_to_hf([run, out, "--dtype", "bf16", "--max-shard-size", "50KB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"GPT2LMHeadModel: 28 tensors, 33,076 parameters in bfloat16, written to {out}"
    first = "model-00001-of-00002.safetensors"
    assert lines[1].split() == [first, f"{os.path.getsize(f'{out}/{first}'):,}", "bytes"]
    assert lines[-2:] == [
        f"  model = AutoModelForCausalLM.from_pretrained({out!r})",
        f"  tokenizer = AutoTokenizer.from_pretrained({out!r})",
    ]
    assert main_to_hf([run, out]) == 1
    assert capsys.readouterr().err.startswith(f"error: `{out}` must be new or an empty folder")


@over_table(
    ("flags", "message"),
    [
        (["--vocab-file", "x"], "`--tokenizer-type` must be given with --vocab-file"),
        (["--no-tokenizer", "--tokenizer-type", "HFTokenizer"], "`--no-tokenizer` must be alone"),
        (["--max-shard-size", "x"], "`--max-shard-size` must be a size"),
    ],
)
def test_flags_without_sense_exit_2(flags, message, tmp_path, capsys):
    assert main_to_hf([str(tmp_path), str(tmp_path / "out"), *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("way", ["to", "from"])
def test_a_script_runs_the_command_from_where_the_user_is(way, tmp_path):
    """`python` is replaced by a script that prints its arguments."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$PWD" "$PYTHONPATH" "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "VIRTUAL_ENV": "any"}
    command = ["bash", str(ROOT / f"scripts/convert_{way}_hf.sh"), "a b", "c", "--dtype", "bf16"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30)
    called = ["-m", "megazero.cli", "checkpoint", f"{way}-hf", "a b", "c", "--dtype", "bf16"]
    assert done.stdout.splitlines() == [str(tmp_path), str(ROOT), *called]


@pytest.mark.slow
def test_the_scripts_convert_both_ways(tmp_path):
    write_folder(tmp_path / "hf", config_for(GPT2), their_tensors(GPT2))
    for script, source, target in (("from", "hf", "run"), ("to", "run", "out")):
        command = ["bash", str(ROOT / f"scripts/convert_{script}_hf.sh"), source, target]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
    assert loaded(tmp_path / "out").keys() == their_tensors(GPT2).keys()
