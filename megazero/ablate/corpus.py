"""The quickstart's corpus: the standard library's sources, a tokenizer trained on them, token ids.

The tools and their settings are those of scripts/quickstart.sh. What exists already is used again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from megazero.errors import DataError

_TOOLS = Path(__file__).resolve().parents[2] / "data_tools"
_VOCABULARY = 8192


@dataclass(frozen=True)
class Corpus:
    """The prepared corpus in a folder, which need not exist yet."""

    folder: Path

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of pretrain_gpt.py that name it."""
        return "--data-path", str(self._prefix), *self._tokenizer_flags

    def prepare(self) -> None:
        """Make what is missing or older than what it is made from.

        Raises:
            DataError: a tool failed; it has said why.
        """
        text, tokenizer, index = self._text, self._tokenizer, self._prefix.with_suffix(".idx")
        if not text.exists():
            _run("make_corpus", "--output", text)
        if not _newer(tokenizer, text):
            _run(
                "train_tokenizer", "--input", text, "--output", tokenizer.parent, "--vocab-size", _VOCABULARY
            )
        if not (_newer(index, tokenizer) and self._prefix.with_suffix(".bin").exists()):
            prefix = str(self._prefix).removesuffix("_text_document")
            encode = ("--append-eod", "--workers", os.cpu_count() or 1)
            _run(
                "preprocess_data", "--input", text, "--output-prefix", prefix, *self._tokenizer_flags, *encode
            )

    @property
    def _text(self) -> Path:
        return self.folder / "corpus.jsonl"

    @property
    def _tokenizer(self) -> Path:
        return self.folder / "tokenizer" / "tokenizer.json"

    @property
    def _prefix(self) -> Path:
        return self.folder / "stdlib_text_document"

    @property
    def _tokenizer_flags(self) -> tuple[str, ...]:
        return "--tokenizer-type", "HFTokenizer", "--tokenizer-model", str(self._tokenizer)


def _newer(path: Path, source: Path) -> bool:
    return path.exists() and path.stat().st_mtime >= source.stat().st_mtime


def _run(tool: str, *arguments: object) -> None:
    status = subprocess.run([sys.executable, _TOOLS / f"{tool}.py", *map(str, arguments)]).returncode
    if status != 0:
        raise DataError(
            f"`data_tools/{tool}.py` must make the corpus, but ended with status {status}; see what it says "
            "above, or name data of your own after `--`"
        )
