"""The command `megazero analyze-loss`: measure a model's losses, of training samples or by position."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from megazero.commands.outputs import add_theme, output_folder
from megazero.config.resolve import resolve_or_exit
from megazero.config.tree.config import Config
from megazero.errors import ConfigError, exit_status
from megazero.train.folders import read_folder

if TYPE_CHECKING:
    from megazero.mpu.context import ParallelContext

_EVERY = 10.0  # seconds between two lines


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the command's own flags; all others are the training's."""
    parser = argparse.ArgumentParser(
        prog="megazero analyze-loss",
        description="Measure the loss of every training sample under the checkpoint in --load, and write "
        "index files for a curriculum. Give all flags of the training that they are for (of a BERT's, with "
        "--model-family bert), on any layout; torchrun starts several ranks. What was stopped goes on where "
        "it stopped.",
    )
    parser.add_argument(
        "--output",
        required=True,
        type=output_folder,
        metavar="DIR",
        help="folder of the analysis; files go to DIR/loss",
    )
    parser.add_argument(
        "--by-position",
        type=int,
        metavar="N",
        help="instead, measure a language model's loss at each position over N validation samples, and write "
        "it as DIR/loss_by_position.json, .txt and, where matplotlib is installed, .png",
    )
    parser.add_argument("--name", help="with --by-position: what to call the model (default: its folder)")
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="with --by-position: an earlier loss_by_position.json to show beside it; may be repeated",
    )
    add_theme(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command with its flags; returns the exit status."""
    flags, rest = build_parser().parse_known_args(argv)
    config = resolve_or_exit(rest, program="megazero analyze-loss", reader=read_folder)
    return exit_status(lambda: _run(config, flags))


def _run(config: Config, flags: argparse.Namespace) -> None:
    from megazero.mpu.launch import Launch, join, leave, reporting
    from megazero.train.guards.agreement import settings_and_code

    if flags.by_position is None and (flags.beside or flags.name):
        raise ConfigError("`--by-position` must be given with `--beside` and `--name`, but is not; add it")
    if flags.by_position is not None and flags.by_position < 1:
        raise ConfigError(f"`--by-position` must be at least 1, but is {flags.by_position}; measure a sample")
    launch = Launch.from_environment()
    facts = partial(settings_and_code, config, launch.speaks_for_node)
    context = join(config.parallel, launch, facts=facts)
    with reporting(context):
        if flags.by_position is None:
            _order_samples(config, context, flags.output)
        else:
            _measure_positions(config, context, flags)
    leave(context)


def _order_samples(config: Config, context: ParallelContext, output: Path) -> None:
    from megazero.data_efficiency.histogram import percentiles
    from megazero.data_efficiency.metric_index import MetricIndex
    from megazero.inference.sample_loss import METRIC, SCALE, measure_loss

    due = 0.0
    for done, total in measure_loss(config, context, output):
        if context.rank == 0 and (time.monotonic() >= due or done == total):
            due = time.monotonic() + _EVERY
            print(f"loss of {done:,} of {total:,} samples", file=sys.stderr, flush=True)
    if context.rank == 0:
        prefix = output / METRIC / METRIC
        index = MetricIndex.open(f"{prefix}_index_to_sample", f"{prefix}_index_to_metric")
        shown = ", ".join(f"{value / SCALE:.3f}" for value in percentiles(index))
        print(f"{len(index):,} samples; percentiles 0, 5, 25, 50, 75, 95, 100 of the loss in nats: {shown}")
        print(f'  "index_to_sample_path": "{prefix}_index_to_sample"')
        print(f'  "index_to_metric_path": "{prefix}_index_to_metric"')


def _measure_positions(config: Config, context: ParallelContext, flags: argparse.Namespace) -> None:
    from megazero.inference.position_loss import PositionLoss, draw, measure_position_loss, table

    beside = [PositionLoss.read(path) for path in flags.beside]
    name = flags.name or Path(config.checkpoint.load or "").name
    measured = [*beside, measure_position_loss(config, context, flags.by_position, name)]
    if context.rank == 0:
        flags.output.mkdir(parents=True, exist_ok=True)
        path = flags.output / "loss_by_position.json"
        measured[-1].write(path)
        path.with_suffix(".txt").write_text(table(measured) + "\n", encoding="utf-8")
        print(table(measured))
        if find_spec("matplotlib") is not None:
            draw(measured, path.with_suffix(".png"), flags.theme)
