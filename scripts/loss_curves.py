"""Reads what `--metrics-jsonl` wrote: each step's loss, and the evaluations' in the file beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

from megazero.errors import DataError
from megazero.report.run_folder import beside

Points: TypeAlias = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Curves:
    """The losses of a run.

    Attributes:
        training, validation: (iteration, loss in nats per token), in order.
        spent: what was spent after each iteration, as far as the metrics have it: tokens, and hours of steps.
        layout: the ranks, and how they share the work.
    """

    training: tuple[tuple[int, float], ...]
    validation: tuple[tuple[int, float], ...]
    spent: dict[str, dict[int, float]] = field(default_factory=dict)
    layout: str = ""


def read_curves(metrics: str | Path) -> Curves:
    """The curves in `X.jsonl` and, if they exist, `X.eval.jsonl` and `X.run.jsonl`.

    Raises:
        DataError: a file cannot be read, or a line of it is no record.
    """
    path = Path(metrics)
    files = [beside(path, kind) for kind in ("eval", "run")]
    evaluations, starts = (_records(file) if file.exists() else [] for file in files)
    records = list({record["iteration"]: record for record in _records(path)}.values())
    try:
        return Curves(
            tuple((record["iteration"], _number(record["lm_loss"])) for record in records),
            tuple((e["iteration"], _number(e["lm_loss"])) for e in evaluations if e["split"] == "validation"),
            _spent(records),
            _layout(records, [start for start in starts if start.get("event") == "start"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"`{path}` must be what `--metrics-jsonl` wrote, but a record is not: {error!r}; name another"
        ) from error


def smoothed(points: Points, window: int) -> list[tuple[float, float]]:
    """The mean over the `window` points around each, as many on either side; at the ends of half as many."""
    last, means = len(points) - 1, []
    for middle, (place, _) in enumerate(points):
        half = min(window // 2, middle, last - middle)
        if half < window // 4:
            continue
        around = [loss for _, loss in points[middle - half : middle + half + 1] if math.isfinite(loss)]
        means.append((place, sum(around) / len(around) if around else math.nan))
    return means


def _number(value: object) -> float:
    """A number as metrics have it: what is not finite is a word or null."""
    return math.nan if value is None else float(str(value))


def _spent(records: Sequence[dict]) -> dict[str, dict[int, float]]:
    spent = {}
    steps = [record["iteration"] for record in records]
    if records and all("consumed_tokens" in record for record in records):
        spent["tokens"] = {record["iteration"]: float(record["consumed_tokens"]) for record in records}
    if records and all("seconds" in record for record in records):
        seconds = accumulate(float(record["seconds"]) for record in records)
        spent["hours"] = {step: total / 3600 for step, total in zip(steps, seconds, strict=True)}
    return spent


def _layout(records: Sequence[dict], starts: Sequence[dict]) -> str:
    """What the last start says of the ranks, or else how many of them the metrics have."""
    if starts:
        sizes = dict(starts[-1].get("layout", {}))
        stage = sizes.pop("zero_stage", 0)
        shares = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
        shares += [f"ZeRO stage {stage}"] if stage else []
        ranks, device = starts[-1].get("world_size", 1), starts[-1].get("device", "")
        return (
            f"ranks: {ranks}"
            + (f" ({', '.join(shares)})" if shares else "")
            + (f" on {device}" if device else "")
        )
    ranks = max((len(record.get("memory") or ()) for record in records), default=0)
    return f"ranks: {ranks}" if ranks else ""


def _records(path: Path) -> list[dict]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(
            f"`{path}` must be a file of metrics, but cannot be read: {error}; name another"
        ) from error
