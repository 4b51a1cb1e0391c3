"""The command `megazero analyze-loss`: training samples in the order of their loss under a trained model."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megazero.config.resolve import resolve_or_exit
from megazero.config.tree.config import Config
from megazero.errors import exit_status

_EVERY = 10.0  # seconds between two lines


def build_parser() -> argparse.ArgumentParser:
    """The command's own flags; all others are those of the training."""
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
        type=Path,
        metavar="DIR",
        help="folder of the analysis; files go to DIR/loss",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command with its flags; returns the exit status."""
    flags, rest = build_parser().parse_known_args(argv)
    config = resolve_or_exit(rest, program="megazero analyze-loss")
    return exit_status(lambda: _run(config, flags.output))


def _run(config: Config, output: Path) -> None:
    from megazero.data_efficiency.histogram import percentiles
    from megazero.data_efficiency.metric_index import MetricIndex
    from megazero.inference.sample_loss import METRIC, SCALE, measure_loss
    from megazero.mpu.launch import Launch, join, leave, reporting
    from megazero.train.guards.agreement import settings_and_code

    launch = Launch.from_environment()
    facts = partial(settings_and_code, config, launch.speaks_for_node)
    context = join(config.parallel, launch, facts=facts)
    with reporting(context):
        due = 0.0
        for done, total in measure_loss(config, context, output):
            if context.rank == 0 and (time.monotonic() >= due or done == total):
                due = time.monotonic() + _EVERY
                print(f"loss of {done:,} of {total:,} samples", file=sys.stderr, flush=True)
        if context.rank == 0:
            prefix = output / METRIC / METRIC
            index = MetricIndex.open(f"{prefix}_index_to_sample", f"{prefix}_index_to_metric")
            shown = ", ".join(f"{value / SCALE:.3f}" for value in percentiles(index))
            print(
                f"{len(index):,} samples; percentiles 0, 5, 25, 50, 75, 95, 100 of the loss in nats: {shown}"
            )
            print(f'  "index_to_sample_path": "{prefix}_index_to_sample"')
            print(f'  "index_to_metric_path": "{prefix}_index_to_metric"')
    leave(context)
