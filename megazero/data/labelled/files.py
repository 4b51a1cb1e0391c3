"""Reads labelled files in the formats that they are published in: TSV, JSON objects, and folders of these."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megazero.config.tasks import Task
from megazero.errors import DataError
from megazero.regular_file import read_regular

_Row = dict[str, object]  # column -> value
_READ_IN_FOLDERS = (".txt", ".json", ".jsonl", ".tsv")
# A passage of RACE lists its questions, options and answers under the plurals of a sample's columns.
_PLURALS = (("questions", "question"), ("options", "options"), ("answers", "answer"))


@dataclass(frozen=True)
class LabelledText:
    """One sample as text.

    Attributes:
        identity: the sample's name or number within its file.
        texts: one or two texts; for multiple choice the passage and, if there is one, the question.
        choices: the options of multiple choice; empty for classification.
        label: None if it is unknown.
    """

    identity: str
    texts: tuple[str, ...]
    choices: tuple[str, ...]
    label: str | None


@dataclass(frozen=True)
class LabelledFile:
    """The samples of one file or folder.

    Attributes:
        path: the file or folder.
        samples: the samples in file order.
        remarks: sentences about what was left out.
    """

    path: str
    samples: tuple[LabelledText, ...]
    remarks: tuple[str, ...]


def read_labelled(path: str, task: Task, *, labels_needed: bool) -> LabelledFile:
    """Read the samples of a file, or of all files in a folder by name.

    A file whose first character is `{` holds JSON objects, one after the other; any other file is TSV, in
    which quotes have no meaning. A TSV line with another number of fields than the first line is left out, as
    is a sample without a label if labels are needed.

    Args:
        path: the file or folder.
        task: the names of the columns.
        labels_needed: whether the label column must exist.

    Raises:
        DataError: the path is missing, unreadable or holds no sample, or a column is missing.
    """
    samples: list[LabelledText] = []
    malformed = unlabelled = 0
    for file in _files(Path(path)):
        rows, bad = _rows(file, task, path)
        malformed += bad
        for number, row in enumerate(rows, start=1):
            sample = _sample(
                row, task, f"{file}, sample {number}", str(len(samples) + unlabelled + 1), labels_needed
            )
            if sample.label is None and labels_needed:
                unlabelled += 1
            else:
                samples.append(sample)
    if not samples:
        raise DataError(
            f"`{path}` must hold labelled samples, but has none ({malformed} malformed lines, {unlabelled} "
            "without a label); check the file."
        )
    left_out = ((malformed, "lines with another number of fields"), (unlabelled, "samples without a label"))
    remarks = tuple(f"{path}: left out {count} {what}" for count, what in left_out if count)
    return LabelledFile(path, tuple(samples), remarks)


def _files(path: Path) -> list[Path]:
    if not path.is_dir() and path.exists():
        return [path]
    if not path.is_dir():
        raise DataError(
            f"`{path}` must be a file or folder of labelled samples, but is missing; check the path."
        )
    files = sorted(file for file in path.rglob("*") if file.suffix in _READ_IN_FOLDERS and file.is_file())
    if not files:
        raise DataError(f"`{path}` must hold files ending in {', '.join(_READ_IN_FOLDERS)}, but has none.")
    return files


def _rows(file: Path, task: Task, path: str) -> tuple[Iterator[_Row], int]:
    """The rows of one file, as column -> value, and the number of malformed lines."""
    try:
        text = read_regular(file).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"`{file}` must be readable UTF-8 text, but is not ({error}).") from error
    if not text.strip():
        raise DataError(f"`{file}` must hold labelled samples, but is empty; check the file.")
    if text.lstrip().startswith("{"):
        return _objects(text, file), 0
    return _table(text, task, file)


def _table(text: str, task: Task, file: Path) -> tuple[Iterator[_Row], int]:
    lines = [line.removesuffix("\r").split("\t") for line in text.removesuffix("\n").split("\n")]
    names = lines[0]
    if task.headless and task.texts[0] not in names:
        names = list(task.headless)
    else:
        lines = lines[1:]
    for column in (*task.texts, *task.choices):
        if column not in names:
            raise _missing(column, names, file)
    good = [line for line in lines if len(line) == len(names)]
    return (dict(zip(names, line, strict=True)) for line in good), len(lines) - len(good)


def _objects(text: str, file: Path) -> Iterator[_Row]:
    decoder, position = json.JSONDecoder(), 0
    while position < len(text):
        if text[position].isspace():
            position += 1
            continue
        try:
            value, position = decoder.raw_decode(text, position)
        except ValueError as error:
            line = text.count("\n", 0, position) + 1
            raise DataError(
                f"`{file}` must hold JSON objects, but line {line} does not ({error})."
            ) from error
        if not isinstance(value, dict):
            raise DataError(f"`{file}` must hold JSON objects, but has {str(value)[:40]!r} among them.")
        yield from _questions(value)


def _questions(row: _Row) -> Iterator[_Row]:
    """Yield a row for each question of a passage that lists several; else the row itself."""
    lists = [values for many, _ in _PLURALS if isinstance(values := row.get(many), list)]
    if len(lists) < len(_PLURALS) or len({len(values) for values in lists}) > 1:
        yield row
        return
    rest = {name: value for name, value in row.items() if name not in dict(_PLURALS)}
    for number, values in enumerate(zip(*lists, strict=True)):
        own = {one: value for (_, one), value in zip(_PLURALS, values, strict=True)}
        yield {**rest, **own, "id": f"{row.get('id', '')}-{number}"}


def _sample(row: _Row, task: Task, place: str, number: str, labels_needed: bool) -> LabelledText:
    identity = number
    if task.identity is not None and row.get(task.identity) is not None:
        identity = _text(row[task.identity], task.identity, place)
    return LabelledText(
        identity,
        tuple(_text(_at(row, column, place), column, place) for column in task.texts),
        _choices(row, task.choices, place),
        _label(row, task, place, labels_needed),
    )


def _choices(row: _Row, columns: Sequence[str], place: str) -> tuple[str, ...]:
    if len(columns) != 1:
        return tuple(_text(_at(row, column, place), column, place) for column in columns)
    values = _at(row, columns[0], place)
    if not isinstance(values, list):
        raise DataError(
            f"`{columns[0]}` must list the choices, but is {str(values)[:40]!r} in {place}; name one column "
            "for each choice."
        )
    return tuple(_text(value, columns[0], place) for value in values)


def _label(row: _Row, task: Task, place: str, needed: bool) -> str | None:
    value = _at(row, task.labels.name, place) if needed else row.get(task.labels.name)
    if value is None:
        return None
    label = _text(value, task.labels.name, place).strip()
    return None if label in task.labels.unlabelled else label


def _at(row: _Row, column: str, place: str) -> object:
    if column not in row:
        raise _missing(column, row, place)
    return row[column]


def _missing(column: str, names: Iterable[str], place: object) -> DataError:
    shown = ", ".join(list(names)[:20])
    return DataError(
        f"`{column}` must be a column of {place}, but the columns are {shown[:300]}; name the right one."
    )


def _text(value: object, column: str, place: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    raise DataError(
        f"`{column}` must be text or a number, but is {str(value)[:40]!r} in {place}; correct it."
    )
