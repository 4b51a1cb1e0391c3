"""How long `megazero report` takes for a long run, and how large its page is.

    python -m benchmarks.report_speed                 # 10^6 steps: a temporary file of about 770 MB
    python -m benchmarks.report_speed --steps 100000

Writes a file of metrics as a run with experts writes it, makes its page in a new process a few times, and
prints seconds of the wall and of the processor, the page's size, and what each way to read the file takes.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megazero.report import columns


def record(step: int, draw: random.Random) -> dict[str, object]:
    """The metrics of a step, with the keys and the digits that a run's have."""
    x = draw.random()
    metrics: dict[str, object] = {
        "iteration": step,
        "consumed_samples": 16 * step,
        "consumed_tokens": 1024 * step,
        "lm_loss": 2 + 3 / step**0.2 + 0.1 * x,
        "load_balancing_loss": 4.1 + 0.3 * x,
        "router_entropy": 2.07 - 0.1 * x,
        "total_loss": 2.04 + 3 / step**0.2 + 0.1 * x,
        "grad_norm": 0.5 + x,
        "clip_factor": min(1.0, 1 / (0.5 + x)),
        "learning_rate": 0.004 / (1 + step / 1000),
        "loss_scale": 1.0,
        "skipped": False,
        "seconds": 0.54 + 0.02 * x,
        "tokens_per_second": 1024 / (0.54 + 0.02 * x),
        "tflops": 0.000474 + x / 10000,
        "matmul_share": 0.07 + x / 100,
        "global_batch_size": 16,
        "num_micro_batches": 1,
        "params_norm": None,
        "num_zeros": None,
        "first_bad_parameter": None,
        "phase_seconds": {"data": x / 1000, "forward-backward": 0.5 + x / 100, "optimizer": 0.03 + x / 1000},
        "loss_ratio": 1 + x / 100,
        "loss_deviation": 0.1 * x,
        "grad_norm_deviation": 0.3 * x,
    }
    if step % 100 == 0:
        tokens = [[draw.randrange(600) for _ in range(8)] for _ in range(4)]
        metrics["tokens_per_expert"] = [{"layer": i, "tokens": row} for i, row in enumerate(tokens)]
        metrics["rank_seconds"] = {"own": [0.4, 0.45, 0.5 + x], "waited": [0.0, 0.05, 0.1]}
    return metrics


def write(path: Path, steps: int) -> None:
    """Write the metrics of a run."""
    draw = random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(record(step, draw)) + "\n")


def timed(path: Path, page: Path) -> tuple[float, float]:
    """Seconds of the wall and of the processor that a page takes."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "megazero.cli", "report", str(path), "--output", str(page)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def rates(path: Path) -> dict[str, float]:
    """Way to read -> MB of metrics in a second of one core."""
    with path.open("rb") as file:
        text = file.read(2**23)
    text = text[: text.rfind(b"\n") + 1]
    ways = {"compiled": columns.compiled(), "orjson or json": columns.columns_reference}
    result = {}
    for name, way in ways.items():
        if way is not None:
            began = time.thread_time()
            way(text, 0)
            result[name] = len(text) / 1e6 / (time.thread_time() - began)
    return result


def main() -> None:
    """Write, measure and print."""
    parser = argparse.ArgumentParser(description="time `megazero report` on a long run")
    parser.add_argument("--steps", type=int, default=10**6, help="steps of the run (default 10^6)")
    parser.add_argument("--times", type=int, default=5, help="times to make the page (default 5)")
    parser.add_argument("--metrics", type=Path, help="keep the metrics here, or use those that are here")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, page = flags.metrics or Path(folder) / "long.jsonl", Path(folder) / "report.html"
        if not path.exists():
            write(path, flags.steps)
        print(f"{flags.steps:,} steps, {path.stat().st_size / 1e6:,.0f} MB of metrics")
        for name, rate in rates(path).items():
            print(f"{name}: {rate:,.0f} MB in a second of one core")
        for _ in range(flags.times):
            wall, processor = timed(path, page)
            print(
                f"{wall:.2f} s, {processor:.2f} s of processors, page of {page.stat().st_size / 1e6:.2f} MB"
            )


if __name__ == "__main__":
    main()
