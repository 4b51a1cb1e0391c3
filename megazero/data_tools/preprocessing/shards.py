"""Make the units of a shard: by the workers of this machine, or by those of a cluster of Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module

from megazero.data.files import whole_file
from megazero.data_tools.preprocessing.chunks import aligned
from megazero.data_tools.preprocessing.inputs import library
from megazero.data_tools.preprocessing.pipeline import (
    Disagreement,
    PreprocessRun,
    Tally,
    open_writers,
    say_if_slow,
    write,
)
from megazero.data_tools.preprocessing.pool import EncoderPool, InlinePool
from megazero.data_tools.preprocessing.progress import ProgressDisplay, RunTotals
from megazero.data_tools.preprocessing.units import UnitFolder, WorkUnit
from megazero.errors import DataError, MegazeroError

_RETRIES = 3  # of a unit whose process dies


def make_units(
    run: PreprocessRun, folder: UnitFolder, units: Sequence[WorkUnit], ray: str | None = None
) -> None:
    """Make the units that are not whole. Raises DataError as `preprocess` does; what is whole is kept.

    ray: the address of a cluster, "local" to start one here, None for the workers of this machine.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if ray is not None:
        library("ray", "ray", "--executor ray")  # before anything is written
    folder.store_plan()
    while missing := (folder := UnitFolder(folder.path, folder.plan)).missing(units):
        kept = len(units) - len(missing)
        if kept:
            print(f"{kept:,} of {len(units):,} units are whole and are kept", file=sys.stderr)
        job = replace(run.job, fast=not folder.is_exact)
        try:
            (_by_workers if ray is None else _by_ray)(replace(run, job=job), folder, missing, ray)
        except Disagreement as disagreement:
            print(f"note: {disagreement}; making all units by the slower tokenizer itself.", file=sys.stderr)
            folder.refuse_fast(str(disagreement))


def _by_workers(run: PreprocessRun, folder: UnitFolder, units: list[WorkUnit], _: str | None) -> None:
    tally = Tally(run.job.keys, ProgressDisplay((), run.log_interval))
    with run.pool() as pool:
        say_if_slow(pool.facts)
        with tally.progress:
            for unit in units:
                _write_unit(run, pool, folder, unit, tally)


def _write_unit(
    run: PreprocessRun, pool: EncoderPool, folder: UnitFolder, unit: WorkUnit, whole: Tally
) -> None:
    """Write the datasets of a unit, then that they are whole."""
    tally = Tally(run.job.keys, whole.progress, whole)
    with ExitStack() as stack:
        writers = open_writers(stack, folder.prefixes(unit), pool.facts)
        bad = stack.enter_context(whole_file(f"{folder.base(unit)}.bad")) if run.job.skip_bad_lines else None
        sources = [aligned(segment) for segment in unit.segments]
        tally.totals.first_problems = write(run, pool, sources, writers, tally, bad)
    folder.finish(unit, tally.totals)


class _RayWorker:
    """A process of Ray that makes units, with its encoder."""

    def __init__(self, run: PreprocessRun, folder: UnitFolder):
        self._run, self._folder, self._pool = run, folder, InlinePool(run.job)

    def make(self, unit: WorkUnit) -> RunTotals:
        """Make a unit; returns its totals."""
        with open(os.devnull, "w") as nowhere:
            whole = Tally(self._run.job.keys, ProgressDisplay((), self._run.log_interval, nowhere))
            _write_unit(self._run, self._pool, self._folder, unit, whole)
        return whole.totals


def _by_ray(run: PreprocessRun, folder: UnitFolder, units: list[WorkUnit], address: str | None) -> None:
    ray = import_module("ray")
    local = {"num_cpus": run.workers.count, "include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **local)
        kind = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=_RETRIES)(_RayWorker)
        count = min(len(units), int(ray.cluster_resources().get("CPU", 1)))
        workers = import_module("ray.util").ActorPool([kind.remote(run, folder) for _ in range(count)])
        tally = Tally(run.job.keys, ProgressDisplay((), run.log_interval))
        for totals in workers.map_unordered(lambda worker, unit: worker.make.remote(unit), units):
            tally.totals.join(totals)
            tally.progress.show(tally.totals)
    except Exception as error:
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, (MegazeroError, Disagreement)):
            raise cause from error
        raise DataError(
            f"`--executor ray` must have a cluster that finishes its tasks, but {type(error).__name__}: "
            f"{str(error).strip().splitlines()[0].rstrip('.')}; run again, which keeps what is whole."
        ) from error
    finally:
        ray.shutdown()
