"""The command `megazero incidents`: show what a run's guards found, as a list, a page or a picture."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megazero.commands.metrics_file import read_metrics
from megazero.commands.outputs import add_picture_flags, run_folder
from megazero.errors import ConfigError, exit_status
from megazero.pictures.style import Theme, count_axis, new_figure, save, styled
from megazero.report.run_folder import find_metrics, run_name
from megazero.train.observe.incidents import page, read_incidents

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = ("number", "time", "iteration", "kind", "action", "ranks", "what")
_WIDEST = 90  # characters of a summary in the list
_WIDE = 50  # values that lie further apart are drawn on a logarithmic axis
_MARKS = MappingProxyType(
    {
        "none": ("o", 6),
        "skipped": ("s", 1),
        "rolled back": ("<", 4),
        "repaired": ("P", 2),
        "went on": ("D", 5),
        "stopped": ("X", 3),
    }
)
"""The shape of each action, and its color's place in a theme's series."""


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="megazero incidents",
        description="List what the guards of a run found: spikes, numbers that are not finite, copies that "
        "differ, faulty machines, slow ranks.",
    )
    parser.add_argument("folder", metavar="DIR", type=run_folder, help="a run's folder, as given to --save")
    parser.add_argument("--show", type=int, metavar="N", help="print the page of incident N")
    parser.add_argument("--json", action="store_true", help="print them as JSON, one per line")
    parser.add_argument(
        "--metrics",
        type=Path,
        help="a file of --metrics-jsonl, whose loss and norm are drawn with them (default: that in DIR)",
    )
    add_picture_flags(parser, "draw them over time, with loss and norm,")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command with its flags; returns the exit status."""
    flags = build_parser().parse_args(argv)
    return exit_status(lambda: _report(flags))


def _report(flags: argparse.Namespace) -> None:
    from megazero.commands.show import print_table

    incidents = read_incidents(flags.folder)
    if flags.metrics is not None and flags.output is None:
        raise ConfigError("`--output` must be set to draw `--metrics`, but is not; name a picture")
    if flags.show is not None:
        if not 0 <= flags.show < len(incidents):
            raise ConfigError(f"`--show` must be the number of an incident, of {len(incidents)}; correct it")
        print(page(incidents[flags.show]), end="")
    elif flags.json:
        for facts in incidents:
            print(json.dumps(facts))
    elif not incidents:
        print(f"no incidents in {flags.folder}")
    else:
        print_table(_COLUMNS, [_row(number, facts) for number, facts in enumerate(incidents)], left=7)
    if flags.output is not None:
        metrics = flags.metrics or find_metrics(flags.folder)
        steps = [] if metrics is None else read_steps(metrics)
        if not incidents and not steps:
            raise ConfigError(
                "`--metrics` must be a file with steps if there are no incidents to draw, but "
                f"{flags.folder} holds none; name one"
            )
        with styled(flags.theme):
            save(incidents_figure(incidents, steps, run_name(flags.folder), flags.theme), flags.output)
        print(f"drawn into {flags.output}")


def _row(number: int, facts: Mapping[str, Any]) -> tuple[object, ...]:
    summary, ranks = facts["summary"], ",".join(map(str, facts["ranks"]))
    shown = summary if len(summary) <= _WIDEST else f"{summary[:_WIDEST]}..."
    return (number, facts["time"], facts["iteration"], facts["kind"], facts["action"], ranks, shown)


def read_steps(path: Path) -> list[tuple[int, float, float]]:
    """Read (iteration, loss, gradient norm) of the steps with a loss in a file of metrics.

    Raises:
        ConfigError: the file cannot be read, or is no file of metrics.
    """
    needs = "an `iteration`, a loss and a `grad_norm`"
    steps = read_metrics(path, "--metrics", needs, _step, refusal=ConfigError)
    return [step for step in steps if step is not None]


def _step(record: Mapping[str, Any]) -> tuple[int, float, float] | None:
    losses = [record[name] for name in record if name.endswith("_loss")]
    if not losses or losses[-1] is None:  # the total comes last
        return None
    return int(record["iteration"]), float(losses[-1]), float(record["grad_norm"])


def incidents_figure(
    incidents: Sequence[Mapping[str, Any]], steps: Sequence[tuple[int, float, float]], run: str, theme: Theme
) -> Figure:
    """Draw loss, gradient norm and incidents over the iterations; it is called within `styled`.

    There are incidents as `read_incidents` reads them, or (iteration, loss, gradient norm) of steps, or both.
    """
    kinds = list(dict.fromkeys(str(facts["kind"]) for facts in incidents))
    heights = [2.0, 2.0] * bool(steps) + [0.35 + 0.3 * len(kinds)] * bool(kinds)
    several = "s" * (len(incidents) != 1)
    facts = f"{len(incidents) or 'no'} incident{several}{': ' if kinds else ''}{', '.join(kinds)}"
    facts += "" if steps else "; no metrics of the run were at hand"
    figure = new_figure(f"Incidents of run {run}", facts, height=1.5 + sum(heights))
    panels = list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
    if steps:
        iterations, *columns = zip(*steps, strict=True)
        for panel, name, values in zip(panels, ("loss (nats)", "gradient norm (L2)"), columns, strict=False):
            panel.plot(iterations, values, label=name)
            panel.set_ylabel(name)
            positive = [value for value in values if 0 < value < math.inf]
            if positive and max(positive) > _WIDE * min(positive):
                panel.set_yscale("log")
    if kinds:
        _draw_events(panels, incidents, kinds, theme)
    panels[-1].set_xlabel("iteration")
    count_axis(panels[-1])
    return figure


def _draw_events(
    panels: Sequence[Axes], incidents: Sequence[Mapping[str, Any]], kinds: Sequence[str], theme: Theme
) -> None:
    """Mark incidents by kind in the last panel, and their iterations in all."""
    events = panels[-1]
    events.set_yticks(range(len(kinds)), kinds)
    events.set_ylim(len(kinds) - 0.4, -0.6)
    for action in dict.fromkeys(str(facts["action"]) for facts in incidents):
        shape, place = _MARKS.get(action, _MARKS["none"])
        color, these = theme.series[place], [facts for facts in incidents if facts["action"] == action]
        at, places = [facts["iteration"] for facts in these], [kinds.index(facts["kind"]) for facts in these]
        name = "nothing" if action == "none" else action
        events.scatter(at, places, label=name, marker=shape, color=color, s=40, zorder=3)
        for panel in panels:
            ends = panel.get_xaxis_transform()
            panel.vlines(at, 0, 1, color=color, linewidth=0.9, transform=ends, zorder=1)
    marks = events.get_legend_handles_labels()
    events.figure.legend(*marks, loc="outside lower center", ncols=len(marks[0]), title="what the run did")
