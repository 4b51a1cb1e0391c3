"""`megazero plan CONFIG`: plan a whole training: memory, traffic, time, and whether it fits."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from megazero.commands.outputs import add_theme, output_folder
from megazero.commands.plan.timeline import chrome_trace
from megazero.commands.training_words import positive, price, training_words
from megazero.config.resolve import BrokenRules, parse_config
from megazero.errors import ConfigError
from megazero.pictures.style import Theme, save, styled
from megazero.plan.device import Device, known_devices
from megazero.plan.layout import Layout
from megazero.plan.report import COLUMNS, PlanReport, report_on
from megazero.plan.tuning import Search
from megazero.plan.words import shown, time_text
from megazero.train.folders import read_folder

DOES_NOT_FIT = 3
_LIKE = 3


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the flags for planning a whole training."""
    parser = argparse.ArgumentParser(
        prog="megazero plan",
        description="Plan a training on paper: whether it fits, what moves, how long a step takes. Nothing "
        "is launched: a rank of each kind of pipeline stage runs on tensors without content.",
        usage="megazero plan [CONFIG] --nproc N [--device D] [--gpus-per-node G] [--output DIR "
        "[--theme light|dark]] [-- FLAGS]",
        epilog=f"The exit status is 0 if it fits, and {DOES_NOT_FIT} if it does not. `megazero plan schedule "
        "--help` and `megazero plan communicators --help` say more of these parts of a plan.",
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="a YAML file of a training's settings")
    parser.add_argument("--nproc", type=positive, required=True, help="ranks of the training")
    parser.add_argument(
        "--device",
        default="h100",
        help=f"{', '.join(known_devices())}, or a file that `megazero profile` wrote (default: h100)",
    )
    parser.add_argument(
        "--gpus-per-node", type=positive, help="ranks on each node (default: as the device's nodes have)"
    )
    parser.add_argument(
        "--price-per-hour",
        type=price,
        metavar="X",
        help="also say what the training costs at X a device-hour",
    )
    parser.add_argument(
        "--output",
        type=output_folder,
        help="a folder for plan.json, timeline.svg, trace.json (for chrome://tracing) and memory.svg",
    )
    add_theme(parser)
    return parser


def plan_job(own: Sequence[str], training: Sequence[str] | None) -> int:
    """Plan a training, print the report, and write files if a folder is given; returns the exit status."""
    flags = build_parser().parse_args(own)
    words = training_words(flags.config, training)
    device = Device.load(flags.device)
    per_node = flags.gpus_per_node or device.inside_node.ranks
    try:
        config = parse_config(words, world_size=flags.nproc, reader=read_folder, only_look=True).config
    except BrokenRules as refusal:
        _show_like(Search(refusal.config, flags.nproc, device, per_node))
        raise
    _say(f"planning {flags.nproc} ranks on {flags.device}: each kind of stage is traced, which takes a while")
    report = report_on(config, flags.nproc, device, per_node, say=_say)
    report = replace(report, price=flags.price_per_hour)
    show(report)
    if not report.fits:
        _show_like(Search(config, flags.nproc, device, per_node))
    if flags.output is not None:
        write(report, flags.output, flags.theme)
    return 0 if report.fits else DOES_NOT_FIT


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show_like(search: Search) -> None:
    """Print the layouts that fit and differ least from the given one."""
    nearest = list(islice(search.like(Layout.of(search.base)), _LIKE))
    if not nearest:
        print("no layout like this one fits; `megazero tune` looks at all of them")
        return
    print("the nearest layouts that fit:")
    for planned in nearest:
        memory, seconds = shown(planned.device_bytes), time_text(planned.seconds)
        print(f"  {planned.layout}: {memory}, {seconds} a step")


def show(report: PlanReport) -> None:
    """Print a report."""
    from megazero.commands.show import print_facts, print_table

    print(f"{report.headline()}\n")
    print_table(COLUMNS, report.rows(), left=1)
    print(f"(on each device at its fullest moment)\n\n{report.verdict()}\n")
    print_facts(report.facts())
    rows = report.traffic_rows()
    if rows:
        print("\nA rank of the stage that moves most, in a step:")
        print_table(("group", "operation", "calls", "bytes", "over"), rows, left=2)
    for warning in report.warnings():
        print(f"warning: {warning}")


def write(report: PlanReport, folder: Path, theme: Theme) -> None:
    """Write a report's files into a folder, which is made if it does not exist; pictures have a theme.

    Raises:
        ConfigError: matplotlib is not installed, or a file cannot be written.
    """
    from megazero.commands.plan.pictures import drawn_plan, memory_figure, step_figure

    trace = json.dumps(chrome_trace(report.times.timeline))
    writers: dict[str, Callable[[Path], object]] = {
        "plan.json": lambda path: path.write_text(f"{json.dumps(report.document(), indent=1)}\n"),
        "trace.json": lambda path: path.write_text(trace),
        "timeline.svg": lambda path: save(step_figure(drawn_plan(report), theme), path),
        "memory.svg": lambda path: save(memory_figure(report, theme), path),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with styled(theme):
            for name, writer in writers.items():
                writer(folder / name)
    except OSError as error:
        raise ConfigError(f"`--output` must be a folder that can be written to, but: {error}") from error
    print(f"written: {', '.join(str(folder / name) for name in writers)}")
