"""The command `megazero incidents`: show what a run's guards found, as a list, a page or a picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megazero.commands.metrics_file import read_metrics
from megazero.commands.outputs import output_picture
from megazero.errors import ConfigError, exit_status
from megazero.pictures import check_suffix, new_figure
from megazero.train.observe.incidents import page, read_incidents

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = ("number", "time", "iteration", "kind", "action", "ranks", "what")
_WIDEST = 90  # characters of a summary in the list


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="megazero incidents",
        description="List what the guards of a run found: spikes, numbers that are not finite, copies that "
        "differ, faulty machines, slow ranks.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="a run's folder, as given to --save")
    parser.add_argument("--show", type=int, metavar="N", help="print the page of incident N")
    parser.add_argument("--json", action="store_true", help="print them as JSON, one per line")
    parser.add_argument(
        "--metrics", type=Path, help="a file of --metrics-jsonl, whose loss and norm are drawn with them"
    )
    parser.add_argument(
        "--output", type=output_picture, help="draw them over time into this file (.png, .svg or .pdf)"
    )
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
        steps = [] if flags.metrics is None else read_steps(flags.metrics)
        try:
            draw_incidents(incidents, steps, flags.output)
        except OSError as error:
            raise ConfigError(f"`--output` must be a file that can be written, but: {error}") from error
        print(f"drawn into {flags.output}")


def _row(number: int, facts: Mapping[str, Any]) -> tuple[str, ...]:
    summary = facts["summary"]
    shown = summary if len(summary) <= _WIDEST else f"{summary[:_WIDEST]}..."
    ranks = ",".join(map(str, facts["ranks"]))
    names = (facts["time"], str(facts["iteration"]), facts["kind"], facts["action"], ranks)
    return (str(number), *names, shown)


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


def draw_incidents(
    incidents: Sequence[Mapping[str, Any]], steps: Sequence[tuple[int, float, float]], path: Path
) -> None:
    """Draw loss, gradient norm and incidents over the iterations. Needs matplotlib.

    Args:
        incidents: the incidents that `read_incidents` read.
        steps: (iteration, loss, gradient norm) of each step; empty to draw the incidents alone.
        path: the file, in the format of its suffix.

    Raises:
        ConfigError: matplotlib is not installed, or the suffix is unknown.
    """
    check_suffix(path)
    figure = new_figure(10, 6)
    kinds = list(dict.fromkeys(facts["kind"] for facts in incidents))
    loss, norm, events = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1 + 0.3 * len(kinds)))
    iterations = [iteration for iteration, _, _ in steps]
    loss.plot(iterations, [value for _, value, _ in steps], linewidth=1)
    loss.set_ylabel("loss (nats)")
    norm.plot(iterations, [value for _, _, value in steps], linewidth=1, color="tab:green")
    norm.set_ylabel("gradient norm")
    if steps:
        norm.set_yscale("log")
    _draw_events(events, incidents, kinds)
    for facts in incidents:
        for panel in (loss, norm):
            panel.axvline(facts["iteration"], color="tab:red", linewidth=0.6, alpha=0.6)
    figure.savefig(path, dpi=120)


def _draw_events(panel: Axes, incidents: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> None:
    panel.set_yticks(range(len(kinds)), kinds)
    panel.set_ylim(-0.6, max(0.6, len(kinds) - 0.4))
    panel.set_xlabel("iteration")
    for action in dict.fromkeys(facts["action"] for facts in incidents):
        these = [facts for facts in incidents if facts["action"] == action]
        places = [kinds.index(facts["kind"]) for facts in these]
        panel.scatter([facts["iteration"] for facts in these], places, label=action, s=28, zorder=3)
    if incidents:
        panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), title="action", frameon=False)
