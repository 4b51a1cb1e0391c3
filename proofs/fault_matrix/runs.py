"""Small trainings with a fault in them: ranks are threads of this process, or processes of a real job."""

from __future__ import annotations

import contextlib
import io
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.folder import saved_iterations
from megazero.config.resolve import parse_config
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.errors import MegazeroError
from megazero.mpu.agreement import agree
from megazero.mpu.context import ParallelContext, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.watch.group import watched as watched_group
from megazero.mpu.watch.watch import Watch, WatchLimits
from megazero.train import assemble, pretraining
from megazero.train.guards.agreement import settings_and_code
from megazero.train.observe.incidents import read_incidents
from megazero.train.parts import feeds
from megazero.train.step.state import TrainState
from proofs.fault_matrix.faults import PoisonedSamples, Spoil, with_faulty_group
from proofs.kill_job import Job
from tests.mpu.test_watch import Notes, Spared

VOCABULARY, USED = 64, 6
STEPS = 25  # of a job of processes, before anything happens to it
MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --lr 1e-2 "
    "--lr-decay-style constant --hidden-dropout 0 --attention-dropout 0 --seed 7 "
    f"--vocab-size {VOCABULARY} --make-vocab-size-divisible-by 1 --split 1,0,0 --micro-batch-size 2 "
    "--eval-iters 0 --log-interval 1 --num-workers 0 --keep-last 99 --initial-loss-scale 1024"
)


@dataclass(frozen=True)
class Setting:
    """Where a training runs.

    Attributes:
        name: for people, such as ``D2 Z1 fp32``.
        grid: the layout.
        flags: those of the layout, the stage and the precision.
    """

    name: str
    grid: ProcessGrid
    flags: str

    @classmethod
    def of(cls, tp: int = 1, pp: int = 1, dp: int = 1, stage: int = 0, dtype: str = "fp32") -> Setting:
        """One of so many ranks along each axis."""
        flags = (
            f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --zero-stage {stage}"
            f"{'' if dtype == 'fp32' else f' --{dtype}'}"
        )
        return cls(f"T{tp} P{pp} D{dp} Z{stage} {dtype}", ProcessGrid(tp=tp, pp=pp, dp=dp), flags)


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        errors: each rank's; None where it ended well.
        states: each rank's last state; None where it ended with an error.
        incidents: those in the run's folder.
        saved: iterations of the checkpoints that are there.
        printed: what ranks printed.
    """

    errors: tuple[MegazeroError | None, ...]
    states: tuple[TrainState | None, ...]
    incidents: tuple[dict, ...]
    saved: tuple[int, ...]
    printed: str

    @property
    def status(self) -> int:
        """The exit status that a job with this outcome has."""
        return max((error.exit_code for error in self.errors if error is not None), default=0)


def write_text(prefix: Path, tokens: int = 40_000) -> str:
    """A dataset that is easy to learn: a few tokens that take turns. Returns the prefix."""
    if not prefix.with_suffix(".idx").exists():
        starts = np.random.Generator(np.random.Philox(key=5)).integers(0, USED, tokens // 40)
        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            for start in starts.tolist():
                writer.add_document((start + np.arange(40)) % USED)
    return str(prefix)


@contextlib.contextmanager
def spoiled(spoils: dict[int, Spoil], noise: Sequence[int]) -> Iterator[None]:
    """Within this, these ranks' engines are spoiled, and these samples are noise."""
    honest_model, honest_feeds = assemble.build_model, feeds.make_feed

    def build_model(vocabulary, context, *rest, **given):
        engine = honest_model(vocabulary, context, *rest, **given)
        if context.rank in spoils:
            spoils[context.rank](engine)
        return engine

    def make_feed(dataset, *rest):
        return honest_feeds(PoisonedSamples(dataset, noise, VOCABULARY), *rest)

    with mock.patch.object(assemble, "build_model", build_model):
        if noise:
            with mock.patch.object(feeds, "make_feed", make_feed):
                yield
        else:
            yield


def watched_context(context: ParallelContext, board: Notes) -> ParallelContext:
    """The same context with its calls watched."""
    watch = Watch(board, context.rank, context.world_size, WatchLimits(60.0), Spared())
    groups = {name: watched_group(group, watch) for name, group in context.groups.items()}
    return replace(context, groups=groups, watch=watch)


def run_processes(folder: Path, ranks: int, flags: str, signals: Sequence[tuple[int, int]]) -> Outcome:
    """Train on Gloo processes that get signals once some steps are done.

    Args:
        folder: of the run.
        ranks: how many there are; all of them are replicas.
        flags: of the training.
        signals: (number, rank) of each signal.
    """
    data = write_text(folder.parent / "text")
    logs, metrics = folder.parent / "logs", folder.parent / "metrics.jsonl"
    logs.mkdir()
    argv = [*MODEL.split(), *flags.split(), "--data-path", data, "--save", str(folder)]
    job = Job([*argv, "--metrics-jsonl", str(metrics)], logs, 0, [None] * ranks)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") > STEPS):
        time.sleep(0.05)
    for number, rank in signals:
        job.send(number, rank)
    victims = {rank for _, rank in signals}
    deadline = time.monotonic() + 60
    while job.alive.keys() - victims and time.monotonic() < deadline:
        time.sleep(0.05)
        job.poll()
    job.end()
    said = {rank: job.said(rank) for rank in job.ranks}
    errors = tuple(
        JobEnded(said[rank]) if rank in victims or job.statuses[rank] else None for rank in job.ranks
    )
    found = tuple(read_incidents(folder))
    return Outcome(errors, (None,) * ranks, found, tuple(saved_iterations(folder)), "\n".join(said.values()))


class JobEnded(MegazeroError):
    """A process of a job ended with a status other than 0, of which there are several: it counts as 1."""

    def __init__(self, said: str):
        super().__init__(said[-500:] or "it said nothing")


def train(
    setting: Setting,
    folder: Path,
    flags: str = "",
    *,
    spoils: dict[int, Spoil] | None = None,
    noise: Sequence[int] = (),
    disks: dict[int, Disk] | None = None,
    group: tuple | None = None,
    flags_of: dict[int, str] | None = None,
    watched: bool = False,
) -> Outcome:
    """Train on thread ranks, with what is to go wrong.

    Args:
        setting: the layout.
        folder: of the run; the dataset lies beside it.
        flags: of all ranks.
        spoils: what breaks on which rank.
        noise: samples that are noise.
        disks: ranks that write to a disk of their own.
        group: (rank, axis, arguments of `FaultyGroup`) for a rank whose group is faulty.
        flags_of: flags of single ranks.
        watched: whether calls are watched, as they are in a job of processes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = write_text(folder.parent / "text")
    world = ThreadWorld(setting.grid.world_size, timeout=120)
    heard, board = io.StringIO(), Notes()

    def rank(number: int) -> tuple[MegazeroError | None, TrainState | None]:
        own = (flags_of or {}).get(number, "")
        argv = shlex.split(f"{MODEL} {setting.flags} --data-path {data} --save {folder} {flags} {own}")
        context: ParallelContext = thread_context(world, setting.grid, number)
        if group is not None and group[0] == number:
            context = with_faulty_group(context, group[1], *group[2:])
        if watched:
            context = watched_context(context, board)
        config = parse_config(argv, world_size=setting.grid.world_size).config
        try:
            # What `join` does with notes, before there are groups.
            agree(context.world, lambda: settings_and_code(config), context.device)
            return None, pretraining.pretrain_on(config, context, (disks or {}).get(number))
        except MegazeroError as error:
            return error, None
        finally:
            if context.watch is not None:
                context.watch.close()

    with spoiled(spoils or {}, noise), contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
        results = world.run(rank)
    errors, states = zip(*results, strict=True)
    incidents = tuple(read_incidents(folder))
    return Outcome(errors, states, incidents, tuple(saved_iterations(folder)), heard.getvalue())
