"""`megazero fill-mask`: texts from flags and the standard input, what is printed, what is refused."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megazero.checkpoint.part import Key
from megazero.checkpoint.tensor_file import Later
from megazero.checkpoint.writer import write_checkpoint
from megazero.cli import main as megazero
from megazero.commands.fill_mask import format_candidates, main
from megazero.commands.generate import main as generate
from megazero.formats.hf.convert import KIND
from megazero.inference.fill import Candidate
from megazero.mpu.context import solo_context
from megazero.mpu.param_spec import spec_of
from megazero.train.parts.chunks import build_chunks
from megazero.train.parts.vocabulary import Vocabulary
from tests.inference.masked import WORDS, config_for, word_pieces
from tests.layouts.layout import Layout

SIZE = len(WORDS) + 2


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run's folder."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return save_run(tmp_path)


def save_run(tmp_path: Path, **changed: str) -> Path:
    """A checkpoint whose head prefers "berlin" to "paris", and both to all else, wherever it is asked.

    `changed` is what it says otherwise about its model.
    """
    tokenizer, config = word_pieces(tmp_path), config_for(Layout())
    chunk = build_chunks(config, Vocabulary(SIZE, 24, None, tokenizer), solo_context(), torch.device("cpu"))[
        0
    ]
    with torch.no_grad():
        chunk.head.bias[WORDS.index("paris")] = 40.0
        chunk.head.bias[WORDS.index("berlin")] = 80.0
    weights = {spec_of(p).name: p.detach()[: spec_of(p).shape[0]] for p in chunk.parameters()}
    laters = [
        (Key(n), Later(t.dtype, tuple(t.shape), lambda t=t: t.contiguous())) for n, t in weights.items()
    ]
    facts = {
        "kind": KIND,
        "model": {**config.model.model_dump(mode="json"), **changed},
        "vocab_size": SIZE,
        "tokenizer": {
            "tokenizer_type": "BertWordPieceLowerCase",
            "vocab_file": str(tmp_path / "vocab.txt"),
        },
    }
    write_checkpoint(tmp_path / "run", 0, laters, facts)
    return tmp_path / "run"


def test_the_likeliest_tokens_are_printed_below_each_text(run, capsys):
    texts = ["The capital of [MASK] is it.", "[MASK] , [MASK]"]
    assert megazero(["fill-mask", "--load", str(run), "--top-k", "2", *texts]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "The capital of [MASK] is it.",
        "  1.0000  berlin",
        "  0.0000  paris",
        "",
        "[MASK] , [MASK]",
        "  mask 1",
        "  1.0000  berlin",
        "  0.0000  paris",
        "  mask 2",
        "  1.0000  berlin",
        "  0.0000  paris",
    ]
    assert captured.err == ""


def test_texts_come_from_the_standard_input_a_line_each(run, capsys, monkeypatch):
    lines = io.BytesIO(b"the [MASK]\r\nof [MASK]\n")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=lines, isatty=lambda: False))
    assert main(["--load", str(run), "--top-k", "1"]) == 0
    assert capsys.readouterr().out == "the [MASK]\n  1.0000  berlin\n\nof [MASK]\n  1.0000  berlin\n"


@pytest.mark.parametrize(
    ("content", "terminal", "status", "message"),
    [
        (b"", False, 1, "the standard input must have a line per text, but is empty"),
        (
            b"ok [MASK]\n\xff [MASK]\n",
            False,
            1,
            "the standard input must be UTF-8, but the standard input line 2",
        ),
        (b"", True, 2, "`TEXT` must be given, or come in on the standard input, but neither is"),
        (b"[MASK]\n\n", False, 1, "`text` must contain [MASK], but text 2 is ''"),
    ],
)
def test_an_input_without_texts_is_refused(content, terminal, status, message, run, capsys, monkeypatch):
    given = SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: terminal)
    monkeypatch.setattr("sys.stdin", given)
    assert main(["--load", str(run)]) == status
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}")
    assert captured.out == ""


def test_a_job_of_several_ranks_does_not_share_an_input(run, capsys, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert main(["--load", str(run)]) == 2
    assert "`TEXT` must be given to a job of 2 ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["no mask"], 1, "`text` must contain [MASK], but text 1 is 'no mask'"),
        (
            ["a " * 15 + "[MASK]"],
            1,
            "`text` must have at most 16 tokens, the model's positions, but text 1 has 18",
        ),
        (["[MASK]", "b\udcff"], 1, "`TEXT` must be UTF-8, but number 2 is 'b\\udcff'"),
        (["[MASK]", "--top-k", "0"], 2, "`top_k` must be at least 1, but is 0"),
        (["[MASK]", "--batch-size", "-1"], 2, "`batch_size` must be at least 1, but is -1"),
    ],
)
def test_what_cannot_be_filled_ends_with_one_sentence(flags, status, message, run, capsys):
    assert main(["--load", str(run), *flags]) == status
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}")
    assert captured.out == ""


def test_a_missing_checkpoint_is_named(tmp_path, capsys):
    assert main(["--load", str(tmp_path), "[MASK]"]) == 1
    assert "`load` must hold a checkpoint" in capsys.readouterr().err


def test_generate_points_to_this_command(run, capsys):
    assert generate(["--load", str(run), "--prompt", "the"]) == 2
    assert capsys.readouterr().err == (
        f"error: `--load` must hold a model for `megazero generate`, but {run}/iter_0000000 holds one of the "
        "family bert; use `megazero fill-mask`\n"
    )


def test_this_command_points_to_generate(tmp_path, capsys):
    assert main(["--load", str(save_run(tmp_path, family="gpt")), "[MASK]"]) == 2
    assert "use `megazero generate`" in capsys.readouterr().err


def test_candidates_of_one_mask_need_no_number():
    found = [[[Candidate("paris", 0.51239), Candidate("##s", 0.1)]]]
    assert format_candidates(["[MASK]!"], found) == "[MASK]!\n  0.5124  paris\n  0.1000  ##s"
