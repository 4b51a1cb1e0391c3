"""Draw the schedules of docs/curriculum.md: the length of each step, and the tokens that they consume.

`python scripts/plot_pacing.py --output docs/images/pacing.png`. The example trains 1,000 steps of up to
1,024 tokens. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.config.pacing import Discrete, Pacing, Root, pieces
from megazero.config.steps import BatchRamp, SequenceLengths, Steps
from megazero.errors import MegazeroError
from megazero.pictures import check_suffix, new_figure

STEPS, FIRST, LAST, RAMP = 1000, 64, 1024, 700

SCHEDULES: tuple[tuple[str, Pacing], ...] = (
    ("fixed_linear", Root(FIRST, LAST, RAMP, 8)),
    ("fixed_root, degree 2", Root(FIRST, LAST, RAMP, 8, 2.0)),
    ("fixed_root, degree 0.5", Root(FIRST, LAST, RAMP, 8, 0.5)),
    ("fixed_discrete", Discrete((64, 256, 512, 1024), (150, 350, 700))),
)


def steps_of(pacing: Pacing, reshaped: bool) -> Steps:
    """The steps of one sample each."""
    lengths = SequenceLengths(pieces(pacing), "iters", LAST if reshaped else None)
    return Steps(BatchRamp.constant(1), 1, lengths)


def draw(output: Path) -> None:
    """Draw both panels into a file."""
    figure = new_figure(10.0, 3.8)
    left, right = figure.subplots(1, 2)
    counts = range(1, STEPS + 1)
    for name, pacing in SCHEDULES:
        (line,) = left.plot(counts, [pacing.at(n) for n in counts], label=name, drawstyle="steps-post")
        for reshaped, style in ((False, "-"), (True, ":")):
            steps = steps_of(pacing, reshaped)
            shares = [steps.before(n).tokens / (STEPS * LAST) for n in counts]
            right.plot(counts, shares, style, color=line.get_color())
    left.set_ylabel("length [tokens]")
    left.set_title("Length of each step", fontsize=10)
    left.legend(frameon=False, fontsize=9)
    right.plot(counts, [n / STEPS for n in counts], color="0.7", linewidth=1)
    right.set_ylabel("tokens consumed, as a share")
    right.set_title("Truncated (lines) and reshaped (dots); grey: no curriculum", fontsize=10)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=110)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="the picture (.png, .svg or .pdf)")
    output = parser.parse_args().output
    try:
        check_suffix(output)
        draw(output)
    except MegazeroError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
