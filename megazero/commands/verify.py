"""The command `megazero verify`: check that a configuration's layout trains like a single process."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

from megazero.config.derive import balanced_by_micro_batch, data_parallel_size
from megazero.config.document import Document, read_file
from megazero.config.fields import fields_with
from megazero.config.flags import scan
from megazero.config.resolve import parse_config
from megazero.config.tasks import task_of
from megazero.config.tree.config import Config
from megazero.config.tree.finetune import OF_ANSWERS
from megazero.config.tree.roles import Role
from megazero.errors import ConfigError, MegazeroError
from megazero.train.folders import read_folder
from megazero.verify.compare import Deviation, compare
from megazero.verify.record import STEPS, Record, with_teacher
from megazero.verify.run import run_alone, run_in_processes, run_in_threads
from megazero.verify.shrink import shrink

_RANKS = 8


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the command's own flags; all others are flags of pretrain_gpt.py."""
    parser = argparse.ArgumentParser(
        prog="megazero verify",
        description="Train a few steps of your configuration, shrunk, on its own layout and in one process, "
        "and compare loss, gradient norm, every gradient and every weight (fp32, up to rounding). All flags "
        "of pretrain_gpt.py and finetune.py are accepted, including --config FILE.",
        epilog="Status 0: the same; 1: not the same; 2: the configuration is refused.",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        help="most ranks to run on; axes are shrunk to fit, but not below 2 (default: 8, or the fewest that "
        "such axes need)",
    )
    parser.add_argument(
        "--world-size",
        type=int,
        help="ranks of the real run (default: two replicas, or one if the batch does not divide by two)",
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"optimizer steps (default {STEPS})")
    parser.add_argument("--processes", action="store_true", help="Gloo processes instead of threads as ranks")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command with its flags; returns the exit status."""
    flags, rest = build_parser().parse_known_args(argv)
    try:
        if flags.steps < 1 or (flags.ranks is not None and flags.ranks < 1):
            raise ConfigError("`--ranks` and `--steps` must be at least 1, but one is less; raise it")
        return _verify_own(flags, rest)
    except ConfigError as error:
        print(
            "\n".join(["megazero verify: refused:", *(f"  {v}" for v in error.violations)]), file=sys.stderr
        )
        return error.exit_code
    except MegazeroError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def resolve(argv: Sequence[str], world_size: int | None, most: int | None = None) -> tuple[Config, int]:
    """Resolve the user's configuration; returns it and its data-parallel size.

    Without a world size, there are two replicas; but one if the batch does not divide by two, or two would
    need more than `most` ranks; and more if experts need them.
    """
    settings = _settings(argv)
    if not {"finetune.task", *(spec.path for spec in fields_with(Role.SOURCE))} & set(settings):
        argv = [*argv, "--mock-data"]  # no data is read, so none needs to be named
    if world_size is not None:
        config = _resolved(argv, world_size)
        return config, data_parallel_size(config, world_size)
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    replica = math.prod(max(1, settings.get(f"parallel.{name}", 1)) for name in names)
    tensor = settings.get("parallel.tensor_model_parallel_size", 1)
    slices = settings.get("parallel.expert_tensor_parallel_size") or tensor
    sharing = settings.get("parallel.expert_model_parallel_size", 1) * slices
    least = max(1, sharing // math.gcd(sharing, tensor))
    count = least if least > 1 or (most is not None and 2 * replica > most) else 2
    try:
        return _resolved(argv, count * replica), count
    except ConfigError:
        return _resolved(argv, least * replica), least


def _resolved(argv: Sequence[str], ranks: int) -> Config:
    """Resolve for `ranks` ranks; a fine-tuning gets the classes and the length that its files would give."""
    config = parse_config(argv, world_size=ranks, reader=read_folder).config
    if config.finetune.task is None:
        return config
    if config.finetune.task in OF_ANSWERS:
        raise ConfigError(
            f"`task` must be left out of a check of a layout, but is {config.finetune.task}; give the line "
            "without it and its files, and the same layers are checked"
        )
    task = task_of(config.finetune)
    classes = config.model.num_classes or (1 if task.multiple_choice else len(task.labels.values) or 2)
    changes = {"model": {"num_classes": classes}, "training": {"train_iters": 1}}
    sections = {name: getattr(config, name).model_copy(update=update) for name, update in changes.items()}
    return config.model_copy(update=sections)


def _settings(argv: Sequence[str]) -> dict[str, Any]:
    """The values that a command line and its file set, by path; errors are reported when it is resolved."""
    flags = scan(argv)
    document = Document() if flags.config_file is None else read_file(flags.config_file)
    return {s.spec.path: s.value for s in [*document.settings, *flags.settings]}


def _verify_own(flags: argparse.Namespace, rest: list[str]) -> int:
    config, replicas = resolve(rest, flags.world_size, flags.ranks)
    shrunk = shrink(config, replicas, flags.ranks or _RANKS)
    grid = shrunk.grid
    if flags.ranks is not None and grid.world_size > flags.ranks:
        raise ConfigError(
            f"`--ranks` must be at least {grid.world_size} for this layout, each of whose axes keeps two "
            f"ranks or more, but is {flags.ranks}; raise it, or leave it out"
        )
    context = f" x context {grid.cp}" if grid.cp > 1 else ""
    experts = f", experts over {grid.ep} x {grid.etp} ranks" if config.model.num_experts else ""
    print(
        f"layout     tensor {grid.tp} x pipeline {grid.pp}{context} x data {grid.dp}{experts}, "
        f"ZeRO stage {config.zero.stage}"
    )
    for note in shrunk.notes:
        print(f"shrunk     {note}")
    run = run_in_processes if flags.processes else run_in_threads
    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        small = with_teacher(shrunk.config, folder) if config.distillation.kd else shrunk.config
        records = run(small, grid, flags.steps)
        expected = run_alone(serial_of(small), flags.steps)
    deviations = compare(records, expected)
    kind = "processes" if flags.processes else "threads"
    print(
        f"ran        {flags.steps} steps on {grid.world_size} rank{'s'[: grid.world_size - 1]} as {kind}, "
        f"{time.perf_counter() - began:.1f} s"
    )
    _show(expected, deviations)
    same = all(d.share <= 1 for d in deviations)
    print("the same training as one process" if same else "NOT the same training as one process")
    return 0 if same else 1


def serial_of(config: Config) -> Config:
    """The same model and batch in one process: nothing sharded, nothing recomputed, one sample at a time.

    The micro-batch stays where samples depend on the others in it: packed samples drop the same elements, and
    some routers balance or limit the tokens of a micro-batch.
    """
    dependent = config.data.bert_pack or balanced_by_micro_batch(config.model)
    size = config.batch.micro_batch_size if dependent else 1
    return config.model_copy(
        update={
            "parallel": config.parallel.model_copy(
                update={
                    "tensor_model_parallel_size": 1,
                    "pipeline_model_parallel_size": 1,
                    "num_virtual_stages_per_pipeline_rank": None,
                    "pipeline_schedule": "auto",
                    "pipeline_partition": "uniform",
                    "sequence_parallel": False,
                    "context_parallel_size": 1,
                    "cp_comm_type": ("p2p",),
                    "hierarchical_context_parallel_sizes": None,
                    "expert_model_parallel_size": 1,
                    "expert_tensor_parallel_size": None,
                }
            ),
            "zero": type(config.zero)(),
            "recompute": type(config.recompute)(),
            "batch": config.batch.model_copy(update={"micro_batch_size": size}),
        }
    )


def _show(expected: Record, deviations: list[Deviation]) -> None:
    for label in expected.losses[0]:
        values = (losses.get(label) for losses in expected.losses)
        print(f"{label:<10} {' '.join('-' if value is None else f'{value:.6f}' for value in values)}")
    print(f"norm       {' '.join(f'{norm:.6f}' for norm in expected.grad_norms)}")
    for deviation in deviations:
        verdict = "ok " if deviation.share <= 1 else "BAD"
        print(f"{verdict}        {deviation}")
