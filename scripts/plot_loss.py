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

from scripts.loss_curves import Curves, read_curves, smoothed


def draw(curves: Curves, entropy: float | None, output: str) -> None:
    """Writes the picture; its suffix decides the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, losses = zip(*curves.training, strict=True)
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="training, each step")
    window = max(1, len(steps) // 30)
    if window > 1:
        label = f"training, mean of {window} steps"
        axes.plot(*zip(*smoothed(curves.training, window), strict=True), color="tab:blue", label=label)
    if curves.validation:
        axes.plot(*zip(*curves.validation, strict=True), "o-", color="tab:orange", label="validation")
    if entropy is not None:
        label = f"unigram entropy ({entropy:.2f})"
        axes.axhline(entropy, color="tab:gray", linestyle="--", label=label)
    axes.set(xlabel="iteration", ylabel="loss (nats per token)", title="Language model loss")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    """Draws; 0 if the picture was written, 1 if there is nothing to draw."""
    parser = argparse.ArgumentParser(prog="plot_loss.py", description=__doc__.split("\n")[0])
    parser.add_argument("metrics", metavar="METRICS.jsonl", help="what --metrics-jsonl wrote")
    parser.add_argument("--output", required=True, metavar="FILE", help="picture to write")
    parser.add_argument("--unigram-entropy", type=float, metavar="X", help="nats per token")
    args = parser.parse_args(argv)
    curves = read_curves(args.metrics)
    if not curves.training:
        print(f"error: {args.metrics} must have an iteration, but has none.", file=sys.stderr)
        return 1
    draw(curves, args.unigram_entropy, args.output)
    print(f"{args.output}: {len(curves.training)} steps, {len(curves.validation)} evaluations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
