"""Draw the toy of docs/policy_gradients.md: the mean reward of each update on each layout.

`MEGAZERO_TOY_CURVES=curves.json python -m pytest --slow tests/post_training/policy/test_kills.py -k toy`
writes the curves, and `python scripts/plot_policy.py curves.json --output docs/images/policy.png` draws
them. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.commands.outputs import add_picture_flags
from megazero.errors import exit_status
from megazero.pictures.style import LIGHT, Theme, new_figure, save, styled

MARKERS = ("o", "s", "^", "D", "v")


def draw(curves: dict[str, list[float]], output: Path, theme: Theme = LIGHT) -> None:
    """Draw the curves into a file; those that are equal lie upon each other."""
    with styled(theme):
        first = next(iter(curves.values()))
        apart = max(abs(a - b) for curve in curves.values() for a, b in zip(curve, first, strict=True))
        below = f"Layouts differ by {apart:.0e} at most." if apart else "All layouts have the same curve."
        figure = new_figure(
            "Policy gradients on a vocabulary of 16: reward of each update", below, height=3.6
        )
        axes = figure.subplots()
        for (name, curve), color, marker in zip(curves.items(), theme.series, MARKERS, strict=False):
            size = 10 - 2 * MARKERS.index(marker)
            axes.plot(
                range(1, len(curve) + 1), curve, marker=marker, markersize=size, label=name, color=color
            )
        axes.set_xlabel("update")
        axes.set_ylabel("mean reward (at most 1)")
        axes.legend()
        save(figure, output)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw as told by the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("curves", type=Path, metavar="FILE", help="JSON: layout -> rewards")
    add_picture_flags(parser, "draw them", required=True)
    flags = parser.parse_args(argv)
    return exit_status(lambda: draw(json.loads(flags.curves.read_text()), flags.output, flags.theme))


if __name__ == "__main__":
    sys.exit(main())
