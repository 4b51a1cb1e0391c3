"""Draws the loss of a training run.

`python scripts/plot_loss.py METRICS.jsonl --output loss.png [--unigram-entropy X]`: each step's loss, its
running mean, the evaluations, and the loss of the best model that ignores context. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megazero.commands.outputs import add_picture_flags
from megazero.errors import ConfigError, DataError, exit_status
from megazero.pictures.style import LIGHT, Theme, count_axis, name_level, new_figure, save, styled
from scripts.loss_curves import Curves, Points, read_curves, smoothed

AXES = {"steps": "step", "tokens": "tokens", "hours": "time of training steps (hours)"}


def draw(
    curves: Curves,
    name: str,
    output: Path,
    entropy: float | None = None,
    axis: str = "steps",
    theme: Theme = LIGHT,
) -> None:
    """Writes the picture; its suffix decides the format."""
    with styled(theme):
        figure = new_figure(f"Loss of {name}", about(curves), height=4.8)
        axes = figure.subplots()
        training, validation = (
            along(curves, axis, points) for points in (curves.training, curves.validation)
        )
        blue, orange = theme.series[:2]
        axes.plot(
            *zip(*training, strict=True), color=blue, alpha=0.45, linewidth=0.8, label="training, each step"
        )
        window = len(training) // 30 // 2 * 2 + 1
        if window > 1:
            label = f"training, mean of {window} steps around each"
            axes.plot(*zip(*smoothed(training, window), strict=True), color=blue, linewidth=1.8, label=label)
        if validation:
            label = "validation"
            axes.plot(*zip(*validation, strict=True), "o", color=orange, markersize=6, label=label, zorder=3)
        if entropy is not None:
            name_level(axes, entropy, f"unigram entropy {entropy:.2f}: the least without context")
        axes.set(xlabel=AXES[axis], ylabel="loss (nats per token)")
        if axis != "hours":
            count_axis(axes)
        axes.legend()
        save(figure, output)


def about(curves: Curves) -> str:
    """What was trained, and what it came to."""
    last = curves.training[-1][0]
    parts = [curves.layout, f"{last:,} steps"]
    if "tokens" in curves.spent:
        parts.append(f"{curves.spent['tokens'][last]:,.0f} tokens")
    if curves.validation:
        parts.append("last validation loss {1:.4f} (step {0:,})".format(*curves.validation[-1]))
    return "; ".join(part for part in parts if part)


def along(curves: Curves, axis: str, points: Points) -> Points:
    """Puts points over what was spent, not over iterations; raises ConfigError if the metrics lack it."""
    if axis == "steps":
        return points
    if axis not in curves.spent:
        known = ", ".join(["steps", *curves.spent])
        raise ConfigError(
            f"`--x-axis` must be one that the metrics have ({known}), but is {axis}; choose another"
        )
    return tuple((curves.spent[axis][int(step)], loss) for step, loss in points if step in curves.spent[axis])


def name_of(metrics: Path) -> str:
    """The name of a run: that of its file of metrics, or of its folder if all runs' files have that name."""
    return metrics.stem if metrics.stem != "metrics" else metrics.resolve().parent.name


def main(argv: Sequence[str] | None = None) -> int:
    """Draws; returns the exit status."""
    parser = argparse.ArgumentParser(prog="plot_loss.py", description=__doc__.split("\n")[0])
    parser.add_argument("metrics", metavar="METRICS.jsonl", type=Path, help="what --metrics-jsonl wrote")
    add_picture_flags(parser, "draw it", required=True)
    parser.add_argument("--unigram-entropy", type=float, metavar="X", help="nats per token")
    parser.add_argument("--x-axis", choices=AXES, default="steps", help="what the loss is drawn over (steps)")
    parser.add_argument("--name", help="what to call the run (default: its file, or its folder)")
    return exit_status(lambda: run(parser.parse_args(argv)))


def run(args: argparse.Namespace) -> None:
    """Does what the flags say."""
    curves = read_curves(args.metrics)
    if not curves.training:
        raise DataError(f"`{args.metrics}` must have an iteration, but has none; train a step")
    name = args.name or name_of(args.metrics)
    draw(curves, name, args.output, args.unigram_entropy, args.x_axis, args.theme)
    print(f"{args.output}: {len(curves.training)} steps, {len(curves.validation)} evaluations")


if __name__ == "__main__":
    sys.exit(main())
