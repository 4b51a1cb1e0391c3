"""Draw the schedules of docs/curriculum.md: the length of each step, and the tokens that they consume.

`python scripts/plot_pacing.py --output docs/images/pacing.png`. The example trains 1,000 steps of up to
1,024 tokens. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.commands.outputs import add_picture_flags
from megazero.config.pacing import Discrete, Pacing, Root, pieces
from megazero.config.steps import BatchRamp, SequenceLengths, Steps
from megazero.errors import exit_status
from megazero.pictures.style import LIGHT, Theme, new_figure, save, styled

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


def draw(output: Path, theme: Theme = LIGHT) -> None:
    """Draw both panels into a file."""
    with styled(theme):
        title = f"Sequences that grow, in a training of {STEPS:,} steps of up to {LAST:,} tokens"
        below = "A truncated sequence loses what is too long; a reshaped one becomes several short ones."
        figure = new_figure(title, below, height=4.2)
        lengths, shares = figure.subplots(1, 2)
        counts = range(1, STEPS + 1)
        for (name, pacing), color in zip(SCHEDULES, theme.series, strict=False):
            values = [pacing.at(step) for step in counts]
            lengths.plot(counts, values, label=name, color=color, drawstyle="steps-post")
            for reshaped, style in ((False, "-"), (True, ":")):
                steps = steps_of(pacing, reshaped)
                consumed = [100 * steps.before(step).tokens / (STEPS * LAST) for step in counts]
                shares.plot(counts, consumed, style, color=color, label=f"_{name}")
        shares.plot(
            counts,
            [100 * step / STEPS for step in counts],
            color=theme.muted,
            linewidth=1,
            label="no curriculum",
        )
        for style, word in (("-", "truncated"), (":", "reshaped")):
            shares.plot([], [], style, color=theme.ink, label=word)
        lengths.set(title="Length of each step", xlabel="step", ylabel="length (tokens)")
        shares.set(title="Tokens consumed", xlabel="step", ylabel="share of all tokens (%)")
        figure.legend(loc="outside lower center", ncols=4)
        save(figure, output)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="plot_pacing.py", description=__doc__.split("\n")[0])
    add_picture_flags(parser, "draw it", required=True)
    flags = parser.parse_args(argv)
    return exit_status(lambda: draw(flags.output, flags.theme))


if __name__ == "__main__":
    sys.exit(main())
