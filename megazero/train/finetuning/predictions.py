"""Writes the file of predictions, one line per sample, atomically."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megazero.data.labelled.files import LabelledFile
from megazero.errors import DataError
from megazero.train.finetuning.scores import probabilities


def write_predictions(
    path: str, files: Sequence[LabelledFile], labels: Sequence[str], scores: np.ndarray
) -> None:
    """Write each sample's file, id, label, prediction and the probability of each label.

    A name that ends in ``.jsonl`` or ``.json`` gets JSON objects; any other gets TSV with a header, in which
    unknown labels are empty, and tabs and newlines in ids become blanks.

    Args:
        path: the file; an old one is replaced.
        scores: [samples, classes].

    Raises:
        DataError: the file cannot be written.
    """
    target = Path(path)
    lines = _json_lines if target.suffix in (".jsonl", ".json") else _tsv_lines
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines(files, labels, scores))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise DataError(
            f"`predictions` must be a file that can be written, but is {path}: {error.strerror}; choose "
            "another."
        ) from error


def check_writable(path: str) -> None:
    """Check at the start of a run that predictions can be written at its end.

    Raises:
        DataError: the path cannot be written.
    """
    folder = Path(path).resolve()
    problem = "it is a folder" if folder.is_dir() else None
    while not folder.exists() or folder == Path(path).resolve():
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK) or not folder.is_dir():
        problem = f"{folder} cannot be written to"
    if problem is not None:
        raise DataError(
            f"`predictions` must be a file that can be written, but is {path}: {problem}; choose another."
        )


def _rows(
    files: Sequence[LabelledFile], labels: Sequence[str], scores: np.ndarray
) -> Iterator[tuple[str, str, str | None, str, list[float]]]:
    samples = ((file.path, sample) for file in files for sample in file.samples)
    for (path, sample), row in zip(samples, probabilities(scores), strict=True):
        yield path, sample.identity, sample.label, labels[int(row.argmax())], row.tolist()


def _json_lines(files: Sequence[LabelledFile], labels: Sequence[str], scores: np.ndarray) -> Iterator[str]:
    for path, identity, label, predicted, shares in _rows(files, labels, scores):
        prediction = {
            "file": path,
            "id": identity,
            "label": label,
            "predicted": predicted,
            "probabilities": dict(zip(labels, shares, strict=True)),
        }
        yield json.dumps(prediction, ensure_ascii=False)


def _tsv_lines(files: Sequence[LabelledFile], labels: Sequence[str], scores: np.ndarray) -> Iterator[str]:
    yield "\t".join(["file", "id", "label", "predicted", *(f"p({label})" for label in labels)])
    for path, identity, label, predicted, shares in _rows(files, labels, scores):
        plain = " ".join(identity.split("\t")).replace("\n", " ").replace("\r", " ")
        yield "\t".join([path, plain, label or "", predicted, *(f"{share:.6g}" for share in shares)])
