"""The command `megazero plan`: show what a launch would do, without launching it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from megazero.commands.outputs import add_picture_flags, output_file
from megazero.commands.plan.timeline import chrome_trace, render_text
from megazero.commands.training_words import positive
from megazero.config.derive import replicas_per_node
from megazero.config.resolve import parse_config
from megazero.config.words import split_training_flags
from megazero.errors import ConfigError, exit_status
from megazero.mpu.communicators import CommunicatorPlan, second_communicators
from megazero.pictures.style import save, styled
from megazero.pipeline.lower import add_transfers
from megazero.pipeline.schedules import KINDS, build_schedule
from megazero.pipeline.simulate import Costs, Timeline, simulate
from megazero.train.folders import read_folder

SUBJECTS = ("schedule", "communicators")
_MOST_PASSES = 1_000_000


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the flags of `megazero plan` and its subjects."""
    parser = argparse.ArgumentParser(prog="megazero plan", description="Say what a launch would do.")
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    schedule = subjects.add_parser(
        "schedule",
        help="the timeline of a pipeline schedule",
        description="Run a pipeline schedule on paper and show its timeline, bubble and activations. F is "
        "forward and B backward, which may be split into I, the gradient of the input, and W, the gradient "
        "of the weights.",
        epilog="Instead of a kind and sizes, flags of a training may follow after `--`, as in `megazero plan "
        "schedule --nproc 8 -- --config gpt.yaml`: the schedule is then that of the training, and each chunk "
        "takes its share of the FLOPs, experts included; the times are those of an average stage.",
    )
    schedule.add_argument("--kind", help=f"one of {', '.join(KINDS)}")
    schedule.add_argument("--stages", type=int, help="pipeline stages")
    schedule.add_argument("--microbatches", type=int, help="micro-batches of a step")
    schedule.add_argument("--nproc", type=positive, help="ranks of the training of the flags after `--`")
    schedule.add_argument(
        "--virtual", type=int, help="chunks per stage (default 1, or 2 for interleaved and zb-v)"
    )
    schedule.add_argument(
        "--group",
        type=positive,
        help="micro-batches that pass through a chunk of interleaved before the next one's turn (default: as "
        "many as stages)",
    )
    schedule.add_argument("--forward", type=float, default=1.0, help="time of a stage's F (default 1)")
    schedule.add_argument("--backward", type=float, default=2.0, help="time of a stage's B (default 2)")
    schedule.add_argument("--input", type=float, default=1.0, help="time of a stage's I (default 1)")
    schedule.add_argument("--weight", type=float, default=1.0, help="time of a stage's W (default 1)")
    schedule.add_argument("--transfer", type=float, default=0.0, help="time of a message (default 0)")
    add_picture_flags(schedule)
    schedule.add_argument(
        "--trace", type=output_file, help="also write it for chrome://tracing into this file (.json)"
    )
    communicators = subjects.add_parser(
        "communicators",
        help="what a training opens between its ranks over NCCL",
        description="List the communicators that the first rank of a training opens on GPUs, with their "
        "priorities and uses. The flags of the training follow after `--`.",
    )
    communicators.add_argument("--nproc", type=positive, required=True, help="ranks of the training")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command with its flags, and those of a training after ``--``; returns the exit status."""
    own, training = split_training_flags(argv)
    if not own or own[0] not in SUBJECTS:
        from megazero.commands.plan.job import plan_job

        return exit_status(lambda: plan_job(own, training))
    flags = build_parser().parse_args(own)
    plan = _plan_schedule if flags.subject == "schedule" else _plan_communicators
    return exit_status(lambda: plan(flags, training))


def _plan_communicators(flags: argparse.Namespace, training: Sequence[str] | None) -> None:
    if training is None:
        raise ConfigError("flags of a training must follow after `--`, but there are none; add them")
    from megazero.mpu.launch import grid_of

    config = parse_config(training, world_size=flags.nproc, reader=read_folder, only_look=True).config
    grid, nodes = grid_of(config.parallel, flags.nproc), replicas_per_node(config.zero)
    seconds = second_communicators(grid, config.zero.stage)
    print(*CommunicatorPlan.of(grid, 0, node_size=nodes, seconds=seconds).table(), sep="\n")


def _plan_schedule(flags: argparse.Namespace, training: Sequence[str] | None) -> None:
    costs = _costs(flags)
    _check_sizes(flags, training is not None)
    if training is None:
        sizes = (flags.stages, flags.microbatches, flags.virtual)
        schedule = build_schedule(flags.kind, *sizes, group=flags.group)
    else:
        from megazero.commands.plan.configured import PlannedPipeline

        pipeline = PlannedPipeline.of(
            parse_config(training, world_size=flags.nproc, reader=read_folder, only_look=True).config,
            flags.nproc,
        )
        schedule, costs = pipeline.schedule, pipeline.costs(costs)
        print(f"{pipeline.report()}\n")
    timeline = simulate(add_transfers(schedule), costs)
    print(report(timeline))
    if flags.output is not None:
        from megazero.commands.plan.pictures import drawn_schedule, step_figure

        whose = [] if training is None else [f"of a training on {flags.nproc:,} ranks"]
        with styled(flags.theme):
            step = drawn_schedule(timeline, flags.forward, *whose)
            save(step_figure(step, flags.theme), flags.output)
    try:
        if flags.trace is not None:
            flags.trace.write_text(json.dumps(chrome_trace(timeline)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"`--trace` must be a file that can be written, but: {error}") from error


def _check_sizes(flags: argparse.Namespace, configured: bool) -> None:
    """Refuse flags unless sizes come either from them or from a training, and not from both."""
    needed, excluded = ["kind", "stages", "microbatches"], ["nproc"]
    if configured:
        needed, excluded = excluded, [*needed, "virtual", "group"]
    where = f"{'with' if configured else 'without'} flags of a training after `--`"
    values = {name: getattr(flags, name) for name in (*needed, *excluded)}
    violations = [f"`--{name}` must be given {where}; add it" for name in needed if values[name] is None]
    violations += [
        f"`--{name}` must be left out {where}, but is {values[name]}; leave it out"
        for name in excluded
        if values[name] is not None
    ]
    if not configured and flags.group is not None and flags.kind not in (None, "interleaved"):
        violations.append(f"`--group` must be left out with `--kind {flags.kind}`; it is for interleaved")
    if not violations and not configured and (passes := flags.stages * flags.microbatches) > _MOST_PASSES:
        violations.append(
            f"`--stages` x `--microbatches` must be at most {_MOST_PASSES:,}, but is {passes:,}; draw fewer"
        )
    if violations:
        raise ConfigError(violations)


def _costs(flags: argparse.Namespace) -> Costs:
    violations = [
        f"`--{name}` must be a finite number above 0, but is {value:g}; correct it"
        for name in ("forward", "backward", "input", "weight")
        if not 0 < (value := getattr(flags, name)) < float("inf")
    ]
    if not 0 <= flags.transfer < float("inf"):
        violations.append(
            f"`--transfer` must be a finite number of at least 0, but is {flags.transfer:g}; correct it"
        )
    if violations:
        raise ConfigError(violations)
    return Costs(flags.forward, flags.backward, flags.input, flags.weight, flags.transfer)


def report(timeline: Timeline) -> str:
    """Format a timeline: the grid, then makespan, bubble, and peak activations per stage."""
    schedule = timeline.schedule
    unit = "micro-batches" if schedule.chunks_per_stage == 1 else "chunks of micro-batches"
    return "\n".join(
        [
            render_text(timeline),
            "",
            f"makespan          {timeline.makespan:g}",
            f"bubble            {timeline.bubble:.1%} of all stages' time",
            f"peak activations  {', '.join(map(str, timeline.peak_activations))} {unit}, stage by stage",
        ]
    )
