from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
BYTES = ["--tokenizer-type", "ByteLevelTokenizer"]


def write_jsonl(path: Path, rows: list) -> str:
    """One line per row; bytes are taken as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(autouse=True)
def without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers be forked: no test here reads a store, but an earlier one of this process may have."""
    monkeypatch.delitem(sys.modules, "obstore", raising=False)


@pytest.fixture
def out(tmp_path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def bpe(tmp_path_factory) -> list[str]:
    """Flags of a small GPT-2 style tokenizer."""
    from megazero.data_tools.train_tokenizer import main

    folder = tmp_path_factory.mktemp("bpe")
    texts = [f"the quick brown fox number {i} jumps over naïve dogs " * 3 for i in range(200)]
    path = write_jsonl(folder / "c.jsonl", [{"text": text} for text in texts])
    assert main(["--input", path, "--output", str(folder), "--vocab-size", "320"]) == 0
    files = ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]
    return ["--tokenizer-type", "GPT2BPETokenizer", *files]
