"""Where a run keeps what it says of itself."""

from __future__ import annotations

from pathlib import Path

METRICS = "metrics.jsonl"
"""The file of metrics in a run's folder, if `--metrics-jsonl` does not name another."""
SAMPLES = "samples.jsonl"
"""The file of texts in a run's folder that its checkpoints generated."""


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
