"""Where a run keeps what it says of itself."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

from megazero.errors import ConfigError

METRICS = "metrics.jsonl"
"""The file of metrics in a run's folder, if `--metrics-jsonl` does not name another."""
SAMPLES = "samples.jsonl"
"""The file of texts in a run's folder that its checkpoints generated."""


def run_name(path: Path) -> str:
    """The name of the run of a file of metrics, a checkpoint or a run's folder."""
    path = path.resolve()
    inside = path.name.startswith("iter_") or (path.name.startswith("metrics") and not path.is_dir())
    return path.parent.name if inside else path.name.removesuffix(".jsonl")


def find_metrics(folder: Path) -> Path | None:
    """The file of metrics of a run: its folder's `metrics.jsonl`, or the only file of metrics in it."""
    usual = folder / METRICS
    if usual.is_file():
        return usual
    aside = (".eval.jsonl", ".run.jsonl", SAMPLES)
    others = [path for path in folder.glob("*.jsonl") if not path.name.endswith(aside)]
    return others[0] if len(others) == 1 else None


def beside(metrics: Path, kind: str) -> Path:
    """The file beside one of metrics with its evaluations (`eval`) or its starts (`run`)."""
    return metrics.with_name(f"{metrics.name.removesuffix('.jsonl')}.{kind}.jsonl")


def add_samples(folder: Path, iteration: int, texts: Iterable[tuple[str, str]]) -> None:
    """Add texts that a run's checkpoint made, as (prompt, continuation), to its folder.

    Raises:
        ConfigError: the folder cannot be written.
    """
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    records = ({"time": moment, "iteration": iteration, "prompt": p, "text": text} for p, text in texts)
    try:
        with (folder / SAMPLES).open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(record)}\n" for record in records)
    except OSError as error:
        raise ConfigError(f"`--load` must be a folder that can be written, but: {error}") from error
