"""The facts that all ranks of a training must agree on: settings, code, tokenizer, data, and progress."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch

from megazero.config.fields import FIELDS
from megazero.config.rules.rule import display_name, value_at
from megazero.config.tree.config import Config
from megazero.config.tree.roles import Role
from megazero.data.blended import SampleDataset
from megazero.data_efficiency.analyzed import AnalyzedDataset
from megazero.ops import cuda, native
from megazero.regular_file import read_regular
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.step.state import TrainState
from megazero.version import VERSION

MAY_DIFFER = frozenset(spec.path for spec in FIELDS if spec.roles & (Role.LOCAL | Role.FILE))
"""Settings that may differ between ranks: they do not affect training, or name files that are compared."""


def settings_and_code(config: Config, speaks_for_node: bool = True) -> dict[str, str | None]:
    """The facts known before the process groups exist: settings, and versions of the code.

    Args:
        speaks_for_node: whether this rank digests the sources, for all ranks of its machine.
    """
    settings = {
        display_name(spec.path): str(value_at(config, spec.path))
        for spec in FIELDS
        if spec.path not in MAY_DIFFER
    }
    return {
        **settings,
        "version of megazero": VERSION,
        "sources of megazero": code_digest() if speaks_for_node else None,
        "version of torch": torch.__version__,
        "compiled kernels": "there" if native.available() else "missing",
        "CUDA kernels": "not in use" if config.parallel.device == "cpu" else cuda.kernel_build(),
    }


def source_files() -> list[Path]:
    """All Python files of megazero."""
    return sorted(Path(__file__).parents[2].rglob("*.py"))


def code_digest() -> str:
    """A digest of megazero's sources."""
    return _digest_of(source_files())


def tokenizer_and_place(config: Config, vocabulary: Vocabulary, state: TrainState) -> dict[str, str]:
    """The tokenizer's content, and the progress of the training in the checkpoint."""
    section = config.tokenizer
    files = (section.vocab_file, section.merge_file, section.tokenizer_model)
    return {
        "vocabulary size": str(vocabulary.size),
        "content of the tokenizer": _content(map(config.data.object_cache.file, filter(None, files))),
        "iteration of the checkpoint": str(state.iteration),
        "samples consumed before": str(state.consumed_samples),
    }


def samples_of(datasets: Iterable[SampleDataset | None]) -> dict[str, str]:
    """The content and the order of the samples of the three splits; None is a split without data."""
    return {
        f"{split} data": "none"
        if dataset is None
        else f"{len(dataset)} samples of {AnalyzedDataset.of(dataset).key}"
        for split, dataset in zip(("training", "validation", "test"), datasets, strict=True)
    }


def labelled_samples(config: Config) -> dict[str, str]:
    """The content of a task's files."""
    task = config.finetune
    return {
        "training data": _content(task.train_data),
        "validation data": _content(task.valid_data),
        "test data": _content(task.test_data),
    }


def _content(named: Iterable[str]) -> str:
    """A digest of the named files, and of all files in the named folders."""
    files: list[Path] = []
    for path in map(Path, named):
        files += sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    return _digest_of(files)


def _digest_of(files: Iterable[Path]) -> str:
    """A digest of the names and contents of files; the error's name replaces unreadable content."""
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        digest.update(path.name.encode())
        try:
            digest.update(read_regular(path))
        except OSError as error:
            digest.update(type(error).__name__.encode())
    return digest.hexdigest()
