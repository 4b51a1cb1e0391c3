"""TensorBoard events under Megatron's tags."""

from __future__ import annotations

import errno
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megazero.config.steps import Progress
from megazero.config.tree.logging import LoggingConfig
from megazero.errors import ConfigError
from megazero.train.observe.metrics import EvalMetrics, StepMetrics
from megazero.train.observe.monitors.base import Monitor, keep_aside

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Point = tuple[str, float, int]
"""A tag, its value, and the step at which it has it."""

_OVER_SAMPLES = " vs samples"


class Scalars:
    """Scalars in a folder for TensorBoard, one for each tag and step.

    A value at a step that its tag has already passed takes the place of the tag's values from that step on.
    torch's `purge_step` would do this for all tags alike, but some count iterations, and some samples.

    Args:
        folder: where the events are; it is created if it does not exist.
        max_queue: events held before they are written.

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

    def add(self, points: Iterable[Point]) -> None:
        """Add values."""
        values = {(tag, step): value for tag, value, step in points}
        late = {tag: step for tag, step in values if step <= self._last.get(tag, -math.inf)}
        if late:
            self.keep(lambda tag, step: step < late.get(tag, math.inf))
        for (tag, step), value in values.items():
            # The writer's own thread runs into a full disk; its error is raised by a later call here.
            try:
                self.writer.add_scalar(tag, value, step)
            except OSError as error:
                raise OSError(error.errno, f"cannot write events ({error.strerror})", self._folder) from error
        self._passed(values)

    def keep(self, wanted: Callable[[str, int], bool]) -> None:
        """Keep the values with a tag and a step that are wanted."""
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
        """Begin anew, and keep the earlier events in a folder of their own."""
        self.close()
        keep_aside(self._files())
        self._last = {}

    def close(self) -> None:
        """Write out what is pending; what is added later begins another file."""
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
    """The records of a file of events, and the tags and steps of their scalars.

    A record is its length (8 bytes) and a checksum of it (4), the event, and a checksum of the event (4). A
    last one that a crash cut short is left out.

    Raises:
        OSError: the file has something else.
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


class TensorBoardMonitor(Monitor):
    """Writes scalars every `tensorboard_log_interval` iterations.

    Losses and the metrics that ask for it are also written over consumed samples, as ``... vs samples``.
    A resumed training adds a file to the folder, and drops what it repeats from the earlier ones. A training
    from iteration 0 moves these to `earlier-1`, `earlier-2`, ..., which TensorBoard shows as other runs.

    Args:
        config: the folder, the interval, the queue size and what else to record.
        resumed: what the training has done so far; None if that is not known yet.

    Raises:
        ConfigError: the tensorboard package is missing, or the folder cannot be written.
    """

    def __init__(self, config: LoggingConfig, resumed: Progress | None = None) -> None:
        assert config.tensorboard_dir is not None, "there is no folder for events"
        try:
            self._scalars = Scalars(config.tensorboard_dir, config.tensorboard_queue_size)
            if resumed is not None:
                self.rewound(resumed)
            self._scalars.writer.flush()
        except ImportError as error:
            raise ConfigError(
                "`tensorboard_dir` must be unset where the tensorboard package is missing, but is "
                f"{config.tensorboard_dir}; run `pip install tensorboard`, or leave the option out."
            ) from error
        except OSError as error:
            raise ConfigError(
                f"`tensorboard_dir` must be a folder that can be written, but is {config.tensorboard_dir}: "
                f"{error.strerror or error}; choose another."
            ) from error
        self._config = config

    def step(self, metrics: StepMetrics) -> None:
        if metrics["iteration"] % self._config.tensorboard_log_interval:
            return
        values = metrics.charts(with_timers=self._config.log_timers_to_tensorboard)
        both = metrics.tags_over_samples()
        self._add(values, both, metrics["iteration"], metrics["consumed_samples"])

    def evaluation(self, metrics: EvalMetrics) -> None:
        values = metrics.charts(with_perplexity=self._config.log_validation_ppl_to_tensorboard)
        self._add(values, values, metrics.iteration, metrics.progress.samples)
        self._scalars.writer.flush()

    def rewound(self, progress: Progress) -> None:
        if progress.iteration == 0:
            self._scalars.set_aside()
            return
        reached = {True: progress.samples, False: progress.iteration}
        self._scalars.keep(lambda tag, step: step <= reached[tag.endswith(_OVER_SAMPLES)])

    def close(self) -> None:
        self._scalars.close()

    def _add(self, values: dict[str, float], both: Iterable[str], iteration: int, samples: int) -> None:
        over_samples = [(f"{tag}{_OVER_SAMPLES}", values[tag], samples) for tag in both]
        self._scalars.add([*((tag, value, iteration) for tag, value in values.items()), *over_samples])
