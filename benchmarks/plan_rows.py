"""Step times that others published, beside planned ones: the table of docs/plan_published.md.

    python benchmarks/plan_rows.py            # prints the table, and writes benchmarks/results
    python benchmarks/plan_rows.py --docs     # writes it into docs/plan_published.md as well
    python benchmarks/plan_rows.py --fit      # first gives each family of software its best efficiency

Rows are in `benchmarks/published/`. There is one profile for a device and one efficiency for a family.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.published.rows import Row, all_rows
from benchmarks.published.step import FAMILIES, Step

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/plan_published.md"
RESULTS = ROOT / "benchmarks/results/2026-11-28-plan-rows.jsonl"
TABLES = re.compile(r"(?<=<!-- rows -->\n).*?(?=<!-- end of rows -->)", re.DOTALL)
CAMPAIGNS = {"bloom-2021", "bloom-2022"}
"""Families whose layouts are ranked, each by itself: the later one is 6% faster at the one point of both."""


@dataclass(frozen=True)
class Planned:
    """A row and the seconds that its step is planned to take."""

    row: Row
    seconds: float

    @property
    def error(self) -> float:
        """The plan's part above the published seconds."""
        return self.seconds / self.row.seconds - 1

    @cached_property
    def mark(self) -> str:
        """Why the row is not judged; empty if it is."""
        return "" if self.row.judged else f"unknown: {', '.join(self.row.figure.unknown)}"


def plan() -> list[Planned]:
    """All rows that ran and are not left out."""
    rows = (row for row in all_rows() if row.figure.fits and not row.figure.left_out)
    return [Planned(row, Step(row).parts.total) for row in rows]


def errors(planned: Sequence[Planned]) -> tuple[int, float, float]:
    """The number of judged rows, their mean error and the worst."""
    sizes = [abs(one.error) for one in planned if one.row.judged]
    return len(sizes), math.fsum(sizes) / len(sizes), max(sizes)


def sweep(planned: Sequence[Planned], family: str) -> list[Planned]:
    """The distinct layouts of one campaign of BLOOM's sweep."""
    return [
        p for p in planned if p.row.software.family == family and re.match(r"D \d+, .*b \d+$", p.row.name)
    ]


def concordance(planned: Sequence[Planned]) -> tuple[int, int]:
    """Pairs that the plan orders rightly less the others, and all pairs, by seconds for a sequence."""
    points = [
        (p.row.seconds / p.row.layout.global_batch, p.seconds / p.row.layout.global_batch) for p in planned
    ]
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(points, 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs), len(signs)


def tau(planned: Sequence[Planned]) -> float:
    """Kendall's tau of BLOOM's timed layouts, within their campaigns."""
    counted = [concordance(sweep(planned, family)) for family in sorted(CAMPAIGNS)]
    return sum(right for right, _ in counted) / sum(pairs for _, pairs in counted)


def tables(planned: Sequence[Planned]) -> str:
    """The summary and the rows, in Markdown."""
    efficiencies = json.loads(FAMILIES.read_text(encoding="utf-8"))
    lines = ["| family | efficiency | rows judged | mean error | worst |", "|---|---|---|---|---|"]
    families = sorted({one.row.software.family for one in planned})
    for family in families:
        mine = [one for one in planned if one.row.software.family == family]
        judged = any(one.row.judged for one in mine)
        number, mean, worst = errors(mine) if judged else (0, 0.0, 0.0)
        shown = f"{mean:.1%} | {worst:.1%}" if judged else "|"
        lines.append(f"| {family} | {efficiencies[family]:.2f} | {number} of {len(mine)} | {shown} |")
    number, mean, worst = errors(planned)
    lines += [f"| **all** | | **{number} of {len(planned)}** | **{mean:.1%}** | **{worst:.1%}** |", ""]
    lines += [
        f"Kendall's tau of BLOOM's 18 timed layouts, within their two campaigns: **{tau(planned):.2f}**.",
        "",
    ]
    lines += ["| row | family | device | GPUs | T·P·C·D | count | published, s | planned, s | error | |"]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for one in planned:
        row, layout = one.row, one.row.layout
        axes = f"{layout.tensor}·{layout.pipeline}·{layout.context}·{layout.data}"
        lines.append(
            f"| {row.name} | {row.software.family} | {row.machine.device} | {layout.gpus:,} | {axes} "
            f"| {row.figure.count} | {row.seconds:.2f} | {one.seconds:.2f} | {one.error:+.1%} | {one.mark} |"
        )
    return "\n".join(lines) + "\n"


def fit() -> None:
    """Write the efficiency of each family: to a hundredth, the one of the least mean error over its rows."""
    families: dict[str, list[Row]] = {}
    for row in all_rows():
        if row.figure.fits and not row.figure.left_out:
            families.setdefault(row.software.family, []).append(row)
    best = {}
    for family, rows in sorted(families.items()):
        judged = [row for row in rows if row.judged] or rows

        def mean(hundredths: int, judged: list[Row] = judged) -> float:
            return math.fsum(abs(Step(row, hundredths / 100).parts.total / row.seconds - 1) for row in judged)

        best[family] = min(range(50, 121), key=mean) / 100
    FAMILIES.write_text(json.dumps(best, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Print the table, and write what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", action="store_true", help="also write the table into the page")
    parser.add_argument("--fit", action="store_true", help="first choose the efficiencies")
    flags = parser.parse_args()
    if flags.fit:
        fit()
    planned = plan()
    text = tables(planned)
    print(text)
    lines = [
        {"row": p.row.name, "family": p.row.software.family, "published": round(p.row.seconds, 4)}
        | {"planned": round(p.seconds, 4), "error": round(p.error, 4), "judged": p.row.judged}
        for p in planned
    ]
    RESULTS.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    if flags.docs:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(TABLES.sub(lambda _: f"\n{text}\n", page), encoding="utf-8")


if __name__ == "__main__":
    main()
