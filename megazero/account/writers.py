"""Write numbers over steps: CSV files, TensorBoard's events, runs of Weights & Biases.

A value at an earlier step than the last one replaces everything written from that step on, so that a training
that goes back leaves each step once.
"""

from __future__ import annotations

import csv
import errno
import math
import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

ScalarPoint = tuple[str, float, int]
"""(tag, value, step)."""


class CsvSeries:
    """CSV files with a step and a value in each row; no step is twice in a file.

    A value at an earlier step than a file's last one replaces the rows from that step on.
    """

    def __init__(self) -> None:
        self._last: dict[Path, float] = {}

    def add(self, path: Path, header: tuple[str, str], step: float, value: object) -> None:
        """Add a row; a new file begins with the header."""
        if path not in self._last:
            steps = [_step(row) for row in _rows(path)] if path.exists() else []
            self._last[path] = max(filter(math.isfinite, steps), default=-math.inf)
        if step <= self._last[path]:
            self.keep(path, lambda earlier: earlier < step)
        fresh = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([header] * fresh + [(step, value)])
        self._last[path] = step

    def keep(self, path: Path, wanted: Callable[[float], bool]) -> None:
        """Remove the rows whose step is not `wanted`."""
        self._last.pop(path, None)
        header, *rows = _rows(path)
        part = path.with_name(path.name + ".part")
        with part.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([header, *(r for r in rows if wanted(_step(r)))])
        os.replace(part, path)


class Scalars:
    """Scalars in a folder for TensorBoard, one for each tag and step.

    A value at an earlier step than its tag's last one replaces the tag's values from that step on. torch's
    `purge_step` does this for all tags at once, but some tags count iterations and others samples.

    Args:
        folder: the folder of the events; it is made if it does not exist.
        max_queue: events that are buffered before they are written.

    Raises:
        ImportError: the tensorboard package is missing.
        OSError: a file in the folder has no events.
    """

    def __init__(self, folder: str, max_queue: int = 10):
        from torch.utils.tensorboard import SummaryWriter

        self._open: Callable[[], SummaryWriter] = lambda: SummaryWriter(folder, max_queue=max_queue)
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._last: dict[str, float] = {}
        for path in self._files():
            for _, points in _records(path):
                self._passed(points)

    @property
    def writer(self) -> SummaryWriter:
        """Torch's writer of the newest file."""
        if self._writer is None:
            self._writer = self._open()
        return self._writer

    def add(self, points: Iterable[ScalarPoint]) -> None:
        """Add values."""
        values = {(tag, step): value for tag, value, step in points}
        late = {tag: step for tag, step in values if step <= self._last.get(tag, -math.inf)}
        if late:
            self.keep(lambda tag, step: step < late.get(tag, math.inf))
        for (tag, step), value in values.items():
            # A thread of the writer meets the full disk; a later call raises its error here.
            try:
                self.writer.add_scalar(tag, value, step)
            except OSError as error:
                raise OSError(error.errno, f"cannot write events ({error.strerror})", self._folder) from error
        self._passed(values)

    def keep(self, wanted: Callable[[str, int], bool]) -> None:
        """Remove the values whose tag and step are not `wanted`."""
        self.close()
        self._last = {}
        for path in self._files():
            records = list(_records(path))
            kept = [(raw, points) for raw, points in records if all(wanted(*point) for point in points)]
            if len(kept) < len(records):
                part = path.with_name("rewritten.part")
                part.write_bytes(b"".join(raw for raw, _ in kept))
                os.replace(part, path)
            for _, points in kept:
                self._passed(points)

    def set_aside(self) -> None:
        """Move the earlier events to a folder of their own, and begin anew."""
        self.close()
        keep_aside(self._files())
        self._last = {}

    def close(self) -> None:
        """Write what is buffered; values that are added later begin another file."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def _files(self) -> list[Path]:
        """The files of events, oldest first."""
        return sorted(Path(self._folder).glob("*tfevents*"))

    def _passed(self, points: Iterable[tuple[str, int]]) -> None:
        for tag, step in points:
            self._last[tag] = max(step, self._last.get(tag, step))


def _records(path: Path) -> Iterator[tuple[bytes, list[tuple[str, int]]]]:
    """Yield the raw records of a file of events, each with the tags and steps of its scalars.

    A record is a length (8 bytes) and its checksum (4), an event, and its checksum (4). An incomplete last
    record is left out.

    Raises:
        OSError: the file is not one of events.
    """
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    data, start = path.read_bytes(), 0
    while start + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        end = start + 12 + length + 4
        if end > len(data):
            return
        try:
            event = Event.FromString(data[start + 12 : end - 4])
        except DecodeError as error:
            raise OSError(errno.EINVAL, "no file of TensorBoard's events", str(path)) from error
        yield data[start:end], [(value.tag, event.step) for value in event.summary.value]
        start = end


def over(axis: str, run: Any) -> Any:
    """Make Weights & Biases draw all metrics of a run over the metric `axis`; returns the run."""
    run.define_metric(axis)
    run.define_metric("*", step_metric=axis)
    return run


def keep_aside(files: Collection[Path]) -> None:
    """Move the files of an earlier training into a new folder beside them: `earlier-1`, `earlier-2`, ..."""
    if not files:
        return
    number, folder = 1, next(iter(files)).parent
    while (aside := folder / f"earlier-{number}").exists():
        number += 1
    aside.mkdir()
    for path in files:
        path.rename(aside / path.name)


def _rows(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def _step(row: list[str]) -> float:
    """The step of a row; NaN for a header or an incomplete row."""
    try:
        return float(row[0]) if len(row) == 2 else math.nan
    except ValueError:
        return math.nan
