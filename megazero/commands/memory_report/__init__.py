"""The command `megazero memory-report`: show what each rank's memory holds, measured or planned."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megazero.commands.memory_report.picture import memory_figure
from megazero.commands.memory_report.table import (
    COLUMNS,
    RankMemory,
    merge_alike,
    read_memory,
    rows,
    verdict,
)
from megazero.commands.outputs import add_picture_flags
from megazero.commands.training_words import positive
from megazero.config.resolve import parse_config
from megazero.config.steps import Progress
from megazero.config.tree.config import Config
from megazero.config.words import split_training_flags
from megazero.errors import ConfigError, exit_status
from megazero.pictures.style import save, styled
from megazero.plan.layout import Layout
from megazero.plan.words import shown
from megazero.report.run_folder import run_name
from megazero.train.folders import read_folder

if TYPE_CHECKING:
    from megazero.plan.plan import Plan


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="megazero memory-report",
        description="Show what the memory of each rank holds: weights, masters, moments, gradient sums, "
        "buffers and activations, on the device, the host and disk.",
        epilog="Instead of a file, flags of a training may follow after `--`, as in `megazero memory-report "
        "--nproc 8 -- --config gpt.yaml`: what it would hold is then worked out without running it.",
    )
    parser.add_argument("metrics", metavar="METRICS", nargs="?", type=Path, help="a file of --metrics-jsonl")
    parser.add_argument("--nproc", type=positive, help="ranks of the training whose flags follow after `--`")
    add_picture_flags(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command with its flags, and those of a training after ``--``; returns the exit status."""
    own, training = split_training_flags(argv)
    flags = build_parser().parse_args(own)
    return exit_status(lambda: _report(flags, training))


def _report(flags: argparse.Namespace, training: Sequence[str] | None) -> None:
    from megazero.commands.show import print_table

    _check(flags, training)
    peak = None
    if training is None:
        memories = merge_alike(read_memory(flags.metrics))
        whose = f"measured in the run {run_name(flags.metrics)}"
    else:
        config = parse_config(training, world_size=flags.nproc, reader=read_folder, only_look=True).config
        plan = first_step(config, flags.nproc)
        memories, peak = merge_alike(planned_memory(plan)), peak_in_words(plan)
        whose = f"planned for {flags.nproc:,} ranks: {Layout.of(config)}"
    print_table(COLUMNS, rows(memories), left=2)
    print(verdict(memories))
    if peak is not None:
        print(peak)
    if flags.output is not None:
        with styled(flags.theme):
            save(memory_figure(memories, whose, flags.theme), flags.output)


def first_step(config: Config, ranks: int) -> Plan:
    """Plan the first step of a training on `ranks` ranks.

    Raises:
        ConfigError: the model cannot be built on that many ranks.
    """
    from megazero.plan.job import PlannedJob, is_apart
    from megazero.plan.plan import Plan

    return Plan.of(PlannedJob(config, ranks, is_apart(config), Progress()))


def planned_memory(plan: Plan) -> list[RankMemory]:
    """The memory of each stage's ranks in a planned step.

    Sizes between steps are exact, unless layers with experts are spread unevenly. Activations are the results
    of kernels, and what they keep for backward.
    """
    return [RankMemory(tuple(plan.job.ranks_of(stage.stage)), stage.memory) for stage in plan.stages]


def peak_in_words(plan: Plan) -> str:
    """Say how much activations take at most, on which stage, and during which action."""
    job, stage = plan.job, max(plan.stages, key=lambda stage: stage.peak.nbytes)
    tokens = job.config.batch.micro_batch_size * job.step.rows * job.step.sequence_length // job.grid.cp
    return (
        f"{tokens:,} tokens of a rank take {shown(stage.memory['device']['activations'])} of activations at "
        f"most, at {stage.peak.when} on stage {stage.stage}"
    )


def _check(flags: argparse.Namespace, training: Sequence[str] | None) -> None:
    if training is None and flags.metrics is None:
        raise ConfigError(
            "`METRICS` must be a file of --metrics-jsonl, but is left out; name one, or give `--nproc N` and "
            "flags of a training after `--`"
        )
    if training is not None and flags.metrics is not None:
        raise ConfigError(
            f"`METRICS` must be left out with flags of a training after `--`, but is {flags.metrics}; leave "
            "out one of the two"
        )
    if (training is None) != (flags.nproc is None):
        state = "is left out" if flags.nproc is None else f"is {flags.nproc}"
        raise ConfigError(
            f"`--nproc` must be given with flags of a training after `--`, and only then, but {state}; "
            "correct it"
        )
