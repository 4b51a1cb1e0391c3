"""Small runs to report on."""

from __future__ import annotations

import json
import re
from pathlib import Path


def record(step: int, **changes) -> dict:
    """The metrics of a step."""
    return {
        "iteration": step,
        "consumed_samples": 4 * step,
        "consumed_tokens": 64 * step,
        "lm_loss": 5 - step / 1000,
        "total_loss": 5.5 - step / 1000,
        "grad_norm": 1.5,
        "learning_rate": 1e-3,
        "skipped": False,
        "seconds": 0.5,
        "tokens_per_second": 128.0,
        "tflops": 0.25,
        "matmul_share": 0.5,
        "first_bad_parameter": None,
        "phase_seconds": {"data": 0.1, "forward-backward": 0.3},
        **changes,
    }


def start(iteration: int = 0, end: int = 100, **config) -> dict:
    """The record of a start."""
    return {
        "event": "start",
        "time": "2030-01-02T03:04:05Z",
        "iteration": iteration,
        "hosts": {"one": 2},
        "parameters": 1000,
        "command": "pretrain_gpt.py",
        "world_size": 2,
        "layout": {"pp": 1, "dp": 2, "cp": 1, "tp": 1, "edp": 1, "ep": 1, "etp": 1, "zero_stage": 1},
        "device": "a device",
        "versions": {"megazero": "0.1.0", "CUDA": None},
        "settings": {"optimizer.lr": 1e-3},
        "config": {"optimizer": {"lr": 1e-3}, **config},
        "end": {"iteration": end, "samples": 4 * end, "tokens": 64 * end},
    }


def write(folder: Path, steps: list[dict], **files: list[dict]) -> Path:
    """Write a run's folder: its metrics, and lines of further files, such as `run` and `eval`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in {
        "metrics": steps,
        **{f"metrics.{kind}": lines for kind, lines in files.items()},
    }.items():
        text = "".join(json.dumps(line) + "\n" for line in records)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


def data_of(page: str) -> dict:
    """The numbers that a page has."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)["page"]
