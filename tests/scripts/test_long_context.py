"""The long-context example: its documents and prompts, the count of right answers, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from megazero.data_tools.train_tokenizer import main as train_tokenizer
from tests.source_tree import ROOT

FOLDER = ROOT / "examples_3d/long_context"
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture(scope="module")
def passkey() -> ModuleType:
    spec = spec_from_file_location("passkey", FOLDER / "passkey.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def make(passkey, tmp_path_factory) -> Callable[..., Path]:
    """A function that runs a command on a small corpus, and returns the file it wrote."""
    folder = tmp_path_factory.mktemp("long")
    texts = [f"def function{i}(x):\n\n    return x * {i}\nmaple = {i}" for i in range(40)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "corpus.jsonl").write_text("".join(lines), encoding="utf-8")
    assert passkey.main(["words", "--output", str(folder / "words.jsonl"), "--count", "50"]) == 0
    inputs = [str(folder / name) for name in ("corpus.jsonl", "words.jsonl")]
    train_tokenizer(["--input", *inputs, "--output", str(folder / "tokenizer"), "--vocab-size", "500"])

    def make(command: str, *flags: str) -> Path:
        text = ["--corpus", inputs[0], "--tokenizer", str(folder / "tokenizer/tokenizer.json")]
        path = folder / f"{command}.txt"
        assert passkey.main([command, *text, "--output", str(path), *flags]) == 0
        return path

    return make


def length(passkey: ModuleType, made: Path, text: str) -> int:
    spec = passkey.TokenizerSpec("HFTokenizer", model=str(made.parent / "tokenizer/tokenizer.json"))
    return len(passkey.build_tokenizer(spec).encode(text))


def test_documents_say_one_key_and_fit(passkey, make):
    made = make("documents", "--tokens", "100", "--count", "60", "--times", "4")
    texts = [json.loads(line)["text"] for line in made.read_text().splitlines()]
    assert len(texts) == 60
    for text in texts:
        said = [word for word in passkey.WORDS if word in text]
        assert len(said) <= 1
        assert text.count("pass key=") == (text.count(f"pass key={said[0]};") if said else 0) <= 4
        assert length(passkey, made, text) <= 104  # text that is cut and joined may become other tokens
    assert sum(text.count("pass key=") > 1 for text in texts) > 30


def test_prompts_end_at_the_question_at_their_distance(passkey, make):
    made = make("prompts", "--distances", "20", "80", "--count", "5")
    keys = json.loads(made.with_suffix(".keys.json").read_text())
    prompts = made.read_text().splitlines()
    assert [key["distance"] for key in keys] == [20] * 5 + [80] * 5
    for prompt, key in zip(prompts, keys, strict=True):
        assert prompt.endswith(" pass key=")
        assert prompt.count(f"pass key={key['key']};") == 1
        between = prompt[prompt.index(" pass key=") :]
        assert abs(length(passkey, made, between) - 3 - key["distance"]) <= 6


def test_right_answers_are_counted(passkey, make, tmp_path, capsys):
    made = make("prompts", "--distances", "20", "40", "--count", "2", "--seed", "3")
    prompts = made.read_text().splitlines()
    keys = [key["key"] for key in json.loads(made.with_suffix(".keys.json").read_text())]
    given = [keys[0] + "; pass key=wrong", "x", keys[2], keys[3] + ";\nmore"]
    answers = tmp_path / "answers.txt"
    shown = [
        f"--- prompt {i + 1}, sample 1 ---\n{prompt}{answer}\n"
        for i, (prompt, answer) in enumerate(zip(prompts, given, strict=True))
    ]
    answers.write_text("".join(shown))
    judged = ["judge", "--prompts", str(made), "--answers", str(answers)]
    assert passkey.main(judged) == 0
    assert capsys.readouterr().out.splitlines() == [
        "distance  right   of",
        "      20      1    2",
        "      40      2    2",
    ]
    answers.write_text("".join(shown[:3]))
    assert passkey.main(judged) != 0
    assert "must hold an answer for each of 4 prompts, but has 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--cp", "0"], "`--cp` must be a positive integer, but is `0`."),
        (["--long-steps"], "`--long-steps` must have a value, but is the last word."),
        (["--steps", "3"], "the option must be one of those that --help lists, but is `--steps`."),
    ],
)
def test_the_example_says_why_it_refuses(arguments, reason):
    run = subprocess.run(
        ["bash", FOLDER / "run.sh", *arguments],
        env={**os.environ, "PATH": PATH},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    assert reason in run.stderr
