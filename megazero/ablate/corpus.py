"""The quickstart's corpora: text, a tokenizer trained on it, token ids, and indexes for curricula.

A GPT learns from the standard library's sources, a BERT from the King James Bible.

The tools and their settings are those of scripts/quickstart.sh. Files that exist are used again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from megazero.config.tree.config import Config
from megazero.config.tree.data_sampling import CurriculumMetric
from megazero.data_efficiency.metrics import NEED_COUNTS
from megazero.errors import DataError


@dataclass(frozen=True)
class _Recipe:
    """The tools and settings that make the corpus of a family; files are relative to the corpus's folder.

    Attributes:
        tool: the tool that writes the text.
        text: the file of the text.
        train: flags for training the tokenizer.
        tokenizer: the file of the trained tokenizer.
        tokenize: flags that choose the tokenizer; its file follows them.
        prefix: path of the dataset, without ``.bin`` or ``.idx``.
        encode: flag of `megazero data preprocess` that says how texts become sequences.
    """

    tool: str
    text: str
    train: tuple[str, ...]
    tokenizer: str
    tokenize: tuple[str, ...]
    prefix: str
    encode: str

    @property
    def suffix(self) -> str:
        """The end of the dataset's name, which preprocessing adds."""
        return f"_text_{'sentence' if self.encode == '--split-sentences' else 'document'}"


_RECIPES: Mapping[str, _Recipe] = MappingProxyType(
    {
        "gpt": _Recipe(
            tool="corpus",
            text="corpus.jsonl",
            train=("--vocab-size", "8192"),
            tokenizer="tokenizer/tokenizer.json",
            tokenize=("--tokenizer-type", "HFTokenizer", "--tokenizer-model"),
            prefix="stdlib_text_document",
            encode="--append-eod",
        ),
        "bert": _Recipe(
            tool="corpus-prose",
            text="prose.jsonl",
            train=("--type", "wordpiece", "--vocab-size", "4096"),
            tokenizer="wordpiece/vocab.txt",
            tokenize=("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file"),
            prefix="kjv_text_sentence",
            encode="--split-sentences",
        ),
    }
)
FAMILIES = tuple(_RECIPES)
"""The families of models that have a corpus."""


@dataclass(frozen=True)
class Corpus:
    """The corpus of a family of models in a folder, which `prepare` makes."""

    folder: Path
    family: str

    @property
    def flags(self) -> tuple[str, ...]:
        """The training's flags that name the corpus."""
        return "--data-path", str(self._prefix), *self._tokenizer_flags

    def prepare(self) -> None:
        """Make each file that is missing or older than its source.

        Raises:
            DataError: a tool failed, and has printed why.
        """
        recipe, text, index = self._recipe, self.folder / self._recipe.text, self._prefix.with_suffix(".idx")
        if not text.exists():
            _run(recipe.tool, "--output", text)
        if not _newer(self._tokenizer, text):
            _run("train-tokenizer", "--input", text, "--output", self._tokenizer.parent, *recipe.train)
        if not (_newer(index, self._tokenizer) and self._prefix.with_suffix(".bin").exists()):
            prefix = str(self._prefix).removesuffix(recipe.suffix)
            encode = (recipe.encode, "--workers", os.cpu_count() or 1)
            _run("preprocess", "--input", text, "--output-prefix", prefix, *self._tokenizer_flags, *encode)

    def indexed(self, metric: CurriculumMetric, config: Config) -> CurriculumMetric:
        """The metric with the paths of the index files that `analyze` makes for a configuration's samples."""
        prefix = self.analysis(config) / metric.name / metric.name
        paths = {f"index_to_{what}_path": f"{prefix}_index_to_{what}" for what in ("sample", "metric")}
        return metric.model_copy(update=paths)

    def analyze(self, metrics: Sequence[CurriculumMetric], config: Config) -> None:
        """Measure the training samples of a configuration, unless that was done before.

        Raises:
            DataError: the tool failed, as for an unknown metric, and has printed why.
        """
        names = [metric.name for metric in metrics]
        counts = ["total_vocab_freq"] if NEED_COUNTS & set(names) else []
        epochs = config.data.train_data_exact_num_epochs or 1
        _run(
            "analyze",
            *("--metric", *counts, *names, "--output", self.analysis(config), *self.flags),
            *("--seq-length", config.model.seq_length, "--split", config.data.split),
            *("--seed", config.training.seed, "--train-data-exact-num-epochs", epochs),
            *("--analyzing-data-type", self.family.upper()),
            *_bert_flags(config),
        )

    def analysis(self, config: Config) -> Path:
        """The folder of a configuration's analysis, named after all settings that change its samples."""
        epochs, split = config.data.train_data_exact_num_epochs or 1, config.data.split.replace(",", "-")
        seed, length = config.training.seed, config.model.seq_length
        kind = "".join(_bert_flags(config)).replace("--", "-")
        name = f"{self.family}{kind}-length-{length}-split-{split}-seed-{seed}-epochs-{epochs}"
        return self.folder / "analysis" / name

    @property
    def _recipe(self) -> _Recipe:
        return _RECIPES[self.family]

    @property
    def _tokenizer(self) -> Path:
        return self.folder / self._recipe.tokenizer

    @property
    def _prefix(self) -> Path:
        return self.folder / self._recipe.prefix

    @property
    def _tokenizer_flags(self) -> tuple[str, ...]:
        return *self._recipe.tokenize, str(self._tokenizer)


def _bert_flags(config: Config) -> tuple[str, ...]:
    """The flags that change the samples of BERT alone."""
    if config.model.family != "bert":
        return ()
    alone = () if config.model.bert_binary_head else ("--bert-no-binary-head",)
    return "--short-seq-prob", str(config.data.short_seq_prob), *alone


def _newer(path: Path, source: Path) -> bool:
    return path.exists() and path.stat().st_mtime >= source.stat().st_mtime


def _run(tool: str, *arguments: object) -> None:
    command = [sys.executable, "-m", "megazero.cli", "data", tool, *map(str, arguments)]
    status = subprocess.run(command).returncode
    if status != 0:
        raise DataError(
            f"`megazero data {tool}` must make the corpus, but ended with status {status}; see what it says "
            "above, or name data of your own after `--`"
        )
