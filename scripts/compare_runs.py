"""Prints a table of what fine-tuning found with several seeds, pretrained and from scratch.

`python scripts/compare_runs.py DIR SEED ...` reads the evaluations of `DIR/pretrained-SEED` and
`DIR/scratch-SEED`, as scripts/finetune_wordnet.sh leaves them.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path


def tested(run: Path) -> tuple[float, float]:
    """Accuracy and macro F1 on the test data, as the run's last evaluation says."""
    lines = (run / "metrics.eval.jsonl").read_text(encoding="utf-8").splitlines()
    found = [record for record in map(json.loads, lines) if record["split"] == "test"]
    return found[-1]["accuracy"], found[-1]["macro_f1"]


def row(name: str, found: Sequence[tuple[float, float]]) -> str:
    """A line of the table: each seed's accuracy, then mean and standard deviation of accuracy and F1."""
    columns = list(zip(*found, strict=True))
    spread = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in columns]
    means = [f"{100 * statistics.mean(c):.2f} ± {100 * s:.2f}" for c, s in zip(columns, spread, strict=True)]
    each = ", ".join(f"{100 * accuracy:.2f}" for accuracy, _ in found)
    return f"| {name} | {each} | {means[0]} | {means[1]} |"


def main(argv: Sequence[str]) -> int:
    """Print the table; 0 if all runs are there."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    if len(argv) < 2:
        print("usage: python scripts/compare_runs.py DIR SEED ...", file=sys.stderr)
        return 2
    folder, seeds = Path(argv[0]), argv[1:]
    try:
        rows = [
            row(name, [tested(folder / f"{start}-{seed}") for seed in seeds])
            for name, start in (("pretrained", "pretrained"), ("from scratch", "scratch"))
        ]
    except (OSError, IndexError) as error:
        print(f"error: every run in `{folder}` must have been tested, but is not ({error})", file=sys.stderr)
        return 1
    print("| start | accuracy of each seed, % | accuracy, % | macro F1, % |\n|---|---|---|---|")
    print("\n".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
