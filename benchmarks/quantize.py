"""Quantizes trained models by several schemes and methods, and compares bytes and perplexities.

    python benchmarks/quantize.py out/quickstart/steps-* --calibrate out/quickstart/stdlib_text_document

Several runs are seeds of one model: their changes are shown as a mean and the extremes. Schemes whose groups
do not divide the model's sizes are left out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import torch

from megazero.errors import ConfigError
from megazero.mpu.context import solo_context
from megazero.quantize.blocks import BlockModel
from megazero.quantize.job import quantize
from megazero.quantize.recipe import Recipe

CASES = (
    *(("W8", "rtn", 0), ("W8A8", "rtn", 0), ("W8A8", "smoothquant", 0)),
    *(("W4", method, group) for group in (128, 64, 32) for method in ("rtn", "gptq", "awq")),
)


@dataclass(frozen=True)
class Measured:
    """One model, quantized in one way; bytes are those of all weights."""

    run: str
    scheme: str
    method: str
    group: int
    before: float
    after: float
    bytes_before: int
    bytes_after: int
    seconds: float


def measure(run: str, flags: argparse.Namespace, scheme: str, method: str, group: int) -> Measured | None:
    """Quantize a run's newest checkpoint; None if the groups do not divide its sizes."""
    with tempfile.TemporaryDirectory() as folder, BlockModel.opened(run, torch.device("cpu")) as model:
        began = time.perf_counter()
        try:
            recipe = Recipe.of(scheme, method, group)
            samples = model.samples(flags.calibrate, None, (flags.samples, flags.held_out))
            report = quantize(
                model, recipe, samples, Path(folder) / "out", solo_context(), tell=lambda line: None
            )
        except ConfigError as error:
            print(f"left out: {scheme} {method} in groups of {group}: {error}", flush=True)
            return None
        seconds = time.perf_counter() - began
    assert report is not None, "one process has the report"
    assert report.perplexities is not None, "there are held-out samples"
    return Measured(run, scheme, method, group, *report.perplexities, *report.sizes, seconds)


def row(cases: list[Measured]) -> str:
    """A line of Markdown for the seeds of one case."""
    first = cases[0]
    changes = [100 * (case.after / case.before - 1) for case in cases]
    spread = f" ({min(changes):+.2f} to {max(changes):+.2f})" if len(cases) > 1 else ""
    groups = str(first.group or "row")
    return (
        f"| {first.scheme} | {first.method} | {groups} | {first.bytes_after / first.bytes_before:.3f} | "
        f"{mean(case.before for case in cases):.3f} | {mean(case.after for case in cases):.3f} | "
        f"{mean(changes):+.2f}%{spread} | {mean(case.seconds for case in cases):.0f} |"
    )


def main() -> None:
    """Measure all cases of all runs, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", help="folders of runs, or checkpoints")
    parser.add_argument("--calibrate", required=True, help="the dataset of the trainings")
    parser.add_argument("--samples", type=int, default=128, help="samples that calibrate (default 128)")
    parser.add_argument("--held-out", type=int, default=128, help="samples of the perplexity (default 128)")
    parser.add_argument("--output", help="a file for the figures, one JSON object a line")
    flags = parser.parse_args()
    print("| scheme | method | group | bytes | perplexity | quantized | change | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for case in CASES:
        measured = [found for run in flags.runs if (found := measure(run, flags, *case))]
        if measured:
            print(row(measured), flush=True)
        if flags.output is not None:
            with Path(flags.output).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(found)) + "\n" for found in measured)


if __name__ == "__main__":
    main()
