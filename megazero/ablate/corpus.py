"""The quickstart's corpus: the standard library's sources, a tokenizer trained on them, token ids, and what
curricula need to know of its samples.

The tools and their settings are those of scripts/quickstart.sh. What exists already is used again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megazero.config.data_sampling import CurriculumMetric
from megazero.config.tree import Config
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

    def indexed(self, metric: CurriculumMetric, config: Config) -> CurriculumMetric:
        """The metric with the index files that `analyze` makes for this configuration's samples."""
        prefix = self._analysis(config) / metric.name / metric.name
        found = {f"index_to_{what}_path": f"{prefix}_index_to_{what}" for what in ("sample", "metric")}
        return metric.model_copy(update=found)

    def analyze(self, metrics: Sequence[CurriculumMetric], config: Config) -> None:
        """Measure the samples that this configuration is trained on, unless that was done before.

        Raises:
            DataError: the tool failed, such as for a metric that it does not know; it has said why.
        """
        names = [metric.name for metric in metrics]
        counts = ["total_vocab_freq"] if any("vocab_rarity" in name for name in names) else []
        epochs = config.data.train_data_exact_num_epochs or 1
        _run(
            "analyze_dataset",
            *("--metric", *counts, *names, "--output", self._analysis(config), *self.flags),
            *("--seq-length", config.model.seq_length, "--split", config.data.split),
            *("--seed", config.training.seed, "--train-data-exact-num-epochs", epochs),
        )

    def _analysis(self, config: Config) -> Path:
        """A folder for each dataset, since numbers of samples mean nothing in another one."""
        epochs, split = config.data.train_data_exact_num_epochs or 1, config.data.split.replace(",", "-")
        seed, length = config.training.seed, config.model.seq_length
        return self.folder / "analysis" / f"length-{length}-split-{split}-seed-{seed}-epochs-{epochs}"

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
