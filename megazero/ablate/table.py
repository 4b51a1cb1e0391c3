"""The results as a Markdown table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megazero.ablate.results import Findings, reaching

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")


def markdown(findings: Sequence[Findings], baseline: str) -> str:
    """Format a table with a row per member, a legend, and the members' titles.

    Args:
        findings: the results of each member.
        baseline: the member whose final loss the others are to reach; without a finished run of it, the
            columns about reaching it are left out.
    """
    base = next((finding for finding in findings if finding.name == baseline), None)
    columns = ["configuration", "validation loss", "parameters", "active", "tokens", "training FLOPs", "time"]
    if base is not None:
        columns += [f"FLOPs to reach {baseline}", f"time to reach {baseline}"]
    lines = [_row(columns), "|---" + "|---:" * (len(columns) - 1) + "|"]
    lines += [_row(_cells(finding, base)) for finding in findings]
    lines += ["", *_legend(findings, base), ""]
    titles = {finding.file: finding.runs[0].title for finding in findings}
    lines += [f"- `{file}`: {title}" for file, title in titles.items() if title]
    return "\n".join(lines).rstrip() + "\n"


def si(number: float) -> str:
    """A number with three digits and an SI prefix: ``23.1 M``, ``840``, ``3.42 T``."""
    if not math.isfinite(number):
        return str(number)
    step = 0
    while abs(number) >= 999.5 and step < len(_PREFIXES) - 1:
        number, step = number / 1000, step + 1
    if step == 0:
        return f"{number:.0f}"
    digits = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:.{digits}f} {_PREFIXES[step]}"


def duration(seconds: float) -> str:
    """Seconds with three digits or more: ``1.25 s``, ``20.0 s``, ``5,400 s``."""
    digits = 2 if seconds < 9.995 else 1 if seconds < 99.95 else 0
    return f"{seconds:,.{digits}f} s"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(finding: Findings, base: Findings | None) -> list[str]:
    end, size = finding.curve[-1], finding.runs[0].size
    spread = "" if finding.spread is None else f" ± {finding.spread:.4f}"
    cells = [
        finding.name,
        f"{end.loss:.4f}{spread}",
        si(size.parameters),
        si(size.active_parameters),
        si(end.tokens),
        si(end.flops),
        duration(end.seconds),
    ]
    if base is not None:
        there, whole = reaching(finding.curve, base.curve[-1].loss), base.curve[-1]
        if finding.name == base.name:
            cells += ["1", "1"]
        elif there is None:
            cells += ["not reached"] * 2
        else:
            cells += [f"{there.flops / whole.flops:.2f}", f"{there.seconds / whole.seconds:.2f}"]
    return cells


def _legend(findings: Sequence[Findings], base: Findings | None) -> list[str]:
    seeds = sorted({run.seed for finding in findings for run in finding.runs})
    ranks = sorted({run.ranks for finding in findings for run in finding.runs})
    several = any(finding.spread is not None for finding in findings)
    numbers = f"Seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"Seed {seeds[0]}"
    lines = [
        f"{numbers}; ranks: {', '.join(map(str, ranks))}. The loss is in nats per token"
        + (", ± is its standard deviation over the seeds;" if several else ";"),
        "active parameters are those that one token uses; time is that of the training steps alone.",
    ]
    if base is not None:
        lines += [
            f"The last two columns are the shares of the FLOPs and of the time of {base.name} after which",
            f"the mean loss is for good no higher than that which {base.name} ends with.",
        ]
    return lines
