"""One JSON object per iteration, for programs and plots."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from megazero.config.steps import Progress
from megazero.errors import ConfigError
from megazero.train.observe.metrics import EvalMetrics, StepMetrics
from megazero.train.observe.monitors.base import Monitor


class JsonlMonitor(Monitor):
    """Appends one object per iteration to `X.jsonl`, and one per evaluation to `X.eval.jsonl`.

    The keys are those of `StepMetrics.record` and `EvalMetrics.record`: a loss term `lm` is ``lm_loss``, and
    null if its count is 0. Floats read back bit for bit. JSON has no inf or NaN: they are written as the
    strings "Infinity", "-Infinity" and "NaN" (as in protobuf's JSON mapping), which Python's `float()` reads.
    Every line is flushed at once.

    A resumed training first drops the lines after `resume_iteration`, whose iterations it repeats. A training
    from iteration 0 starts a new file and keeps an old one as `path.1`, `path.2`, ...

    Args:
        path: the file; its folder is created if needed.
        resume_iteration: number of iterations in the checkpoint that training continues from, or 0.

    Raises:
        ConfigError: the file cannot be written, or is not a file of metrics.
    """

    def __init__(self, path: str | os.PathLike[str], resume_iteration: int = 0) -> None:
        self.path = Path(path)
        self.eval_path = self.path.with_name(self.path.name.removesuffix(".jsonl") + ".eval.jsonl")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for destination in (self.path, self.eval_path):
                _rewind(destination, resume_iteration)
            self._steps = self.path.open("a", encoding="utf-8")
            self._evaluations: IO[str] | None = None
        except OSError as error:
            raise ConfigError(
                f"`metrics_jsonl` must be a file that can be written, but is {self.path}: "
                f"{error.strerror or error}; choose another path."
            ) from error

    def step(self, metrics: StepMetrics) -> None:
        _append(self._steps, self.path, metrics.record())

    def evaluation(self, metrics: EvalMetrics) -> None:
        if self._evaluations is None:
            self._evaluations = self.eval_path.open("a", encoding="utf-8")
        _append(self._evaluations, self.eval_path, metrics.record())

    def rewound(self, progress: Progress) -> None:
        self.close()
        for destination in (self.path, self.eval_path):
            _rewind(destination, progress.iteration)
        self._steps, self._evaluations = self.path.open("a", encoding="utf-8"), None

    def close(self) -> None:
        self._steps.close()
        if self._evaluations is not None:
            self._evaluations.close()


def to_json(value: object) -> object:
    """Replace non-finite floats in `value` by strings that `float()` reads."""
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _append(file: IO[str], path: Path, record: Mapping[str, object]) -> None:
    line = json.dumps(to_json(record), allow_nan=False) + "\n"
    try:
        file.write(line)
        file.flush()
    except OSError as error:
        raise OSError(error.errno, f"cannot write metrics ({error.strerror})", str(path)) from error


def _rewind(path: Path, iteration: int) -> None:
    """Drop the lines of a file after `iteration`; at iteration 0 move the file aside."""
    if not path.exists() or path.stat().st_size == 0:
        return
    # Write a separate file and rename it, so that a crash leaves either the old or the new file.
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as kept:
            kept.writelines(line for line, number in _read(path) if number <= iteration)
        if iteration == 0:
            number = 1
            while (aside := path.with_name(f"{path.name}.{number}")).exists():
                number += 1
            path.rename(aside)
        else:
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _read(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a metrics file with their iterations, except a last line that a crash cut short.

    Raises:
        ConfigError: a line is not an object with metrics.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                numbered = line, int(record["iteration"])
            except (ValueError, KeyError, TypeError) as error:
                if number > 1 and not line.endswith(b"\n"):
                    return
                raise ConfigError(
                    f"`metrics_jsonl` must be a new file or a file of metrics, but line {number} of {path} "
                    f"is not an object with an `iteration`; choose another path."
                ) from error
            if line.endswith(b"\n"):
                yield numbered
