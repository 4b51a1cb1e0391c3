"""Draw a study again from the lines that `megazero ablate` left.

`python scripts/plot_study.py results.jsonl --baseline dense --output results.png`. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megazero.ablate.picture import draw
from megazero.ablate.results import EvaluationPoint, Findings, RunResult, grouped
from megazero.ablate.sizes import ModelSize
from megazero.commands.outputs import add_picture_flags
from megazero.errors import ConfigError, DataError, exit_status


def read_lines(path: Path) -> tuple[Findings, ...]:
    """Read what `megazero.ablate.results.write_lines` wrote.

    Raises:
        DataError: the file cannot be read, has another form, or holds no run.
    """
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        runs = [_run(record) for record in records]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"`RESULTS` must be what `megazero ablate` wrote, but {path} is not: {error!r}; name another"
        ) from error
    if not runs:
        raise DataError(f"`RESULTS` must hold a run, but {path} is empty; wait until one is finished")
    return grouped(runs)


def _run(record: dict) -> RunResult:
    size = ModelSize(*(record[name] for name in ("parameters", "active_parameters", "flops_per_token")))
    curve = tuple(EvaluationPoint(**{**point, "loss": float(point["loss"])}) for point in record["curve"])
    names = ("configuration", "title", "seed", "ranks", "fingerprint")
    return RunResult(*(record[name] for name in names), size, curve)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="plot_study.py", description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, metavar="RESULTS", help="a results.jsonl")
    parser.add_argument(
        "--baseline", metavar="NAME", help="what others are compared with (default: the first)"
    )
    parser.add_argument("--name", help="what to call the study (default: the file's name)")
    add_picture_flags(parser, "draw it", required=True)
    flags = parser.parse_args(argv)
    return exit_status(lambda: _draw(flags))


def _draw(flags: argparse.Namespace) -> None:
    findings = read_lines(flags.results)
    names = [finding.name for finding in findings]
    baseline = flags.baseline or names[0]
    if baseline not in names:
        raise ConfigError(f"`--baseline` must be one of {', '.join(names)}, but is {baseline}; correct it")
    draw(findings, baseline, flags.output, flags.name or flags.results.stem, flags.theme)


if __name__ == "__main__":
    sys.exit(main())
