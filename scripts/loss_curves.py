"""Reads what `--metrics-jsonl` wrote: each step's loss, and the evaluations' in the file beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Curves:
    """(iteration, loss in nats per token), in order."""

    training: tuple[tuple[int, float], ...]
    validation: tuple[tuple[int, float], ...]


def read_curves(metrics: str | Path) -> Curves:
    """The curves in `X.jsonl` and, if it exists, `X.eval.jsonl`."""
    path = Path(metrics)
    beside = path.with_name(path.name.removesuffix(".jsonl") + ".eval.jsonl")
    evaluations = _records(beside) if beside.exists() else []
    return Curves(
        tuple((each["iteration"], float(each["lm_loss"])) for each in _records(path)),
        tuple((e["iteration"], float(e["lm_loss"])) for e in evaluations if e["split"] == "validation"),
    )


def smoothed(points: tuple[tuple[int, float], ...], window: int) -> list[tuple[int, float]]:
    """The mean over the last `window` points up to each."""
    losses = [loss for _, loss in points]
    means = [losses[max(0, end - window) : end] for end in range(1, len(losses) + 1)]
    return [(step, sum(part) / len(part)) for (step, _), part in zip(points, means, strict=True)]


def _records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
