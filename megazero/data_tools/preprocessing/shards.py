"""Make the units of a shard: by the workers of this machine, or by those of a cluster of Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from typing import Any

from megazero.data.files import whole_file
from megazero.data_tools.preprocessing.chunks import aligned
from megazero.data_tools.preprocessing.encode import EncodeJob
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
from megazero.data_tools.preprocessing.units import Unit, UnitFolder
from megazero.errors import DataError, MegazeroError

_RETRIES = 3  # of a task whose process dies


def make_units(run: PreprocessRun, folder: UnitFolder, units: Sequence[Unit], ray: str | None = None) -> None:
    """Make the units that are not whole. Raises DataError as `preprocess` does; what is whole is kept.

    ray: the address of a cluster, "local" to start one here, None for the workers of this machine.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    folder.store_plan()
    while missing := (folder := UnitFolder(folder.path, folder.plan)).missing(units):
        kept = len(units) - len(missing)
        if kept:
            print(f"{kept:,} of {len(units):,} units are whole and are kept", file=sys.stderr)
        job = replace(run.job, fast=not folder.is_exact, list_bad_lines=run.job.skip_bad_lines)
        try:
            (_by_workers if ray is None else _by_ray)(replace(run, job=job), folder, missing, ray)
        except Disagreement as disagreement:
            print(f"note: {disagreement}; making all units by the slower tokenizer itself.", file=sys.stderr)
            folder.refuse_fast(str(disagreement))


def _by_workers(run: PreprocessRun, folder: UnitFolder, units: list[Unit], _: str | None) -> None:
    tally = Tally(run.job.keys, ProgressDisplay((), run.log_interval))
    with run.pool() as pool:
        say_if_slow(pool.facts)
        with tally.progress:
            for unit in units:
                _write_unit(run, pool, folder, unit, tally)


def _write_unit(run: PreprocessRun, pool: EncoderPool, folder: UnitFolder, unit: Unit, whole: Tally) -> None:
    """Write the datasets of a unit, then that they are whole."""
    tally = Tally(run.job.keys, whole.progress, whole)
    with ExitStack() as stack:
        writers = open_writers(stack, folder.prefixes(unit), pool.facts)
        bad = stack.enter_context(whole_file(f"{folder.base(unit)}.bad")) if run.job.list_bad_lines else None
        sources = [aligned(segment) for segment in unit.segments]
        tally.totals.first_problems = write(run, pool, sources, writers, tally, bad)
    folder.finish(unit, tally.totals)


@lru_cache(maxsize=1)
def _own_pool(job: EncodeJob) -> InlinePool:
    return InlinePool(job)


def _as_task(run: PreprocessRun, folder: UnitFolder, unit: Unit) -> RunTotals:
    """Make a unit in a process of Ray; returns its totals."""
    with open(os.devnull, "w") as nowhere:
        tally = Tally(run.job.keys, ProgressDisplay((), run.log_interval, nowhere))
        _write_unit(run, _own_pool(run.job), folder, unit, tally)
    return tally.totals


def _by_ray(run: PreprocessRun, folder: UnitFolder, units: list[Unit], address: str | None) -> None:
    ray = library("ray", "ray", "--executor ray")
    local = address == "local"
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if local:
        quiet |= {"num_cpus": run.workers.count, "include_dashboard": False}
    try:
        ray.init(address=address, **quiet)
        task = ray.remote(num_cpus=1, max_retries=_RETRIES)(_as_task)
        waiting = [task.remote(run, folder, unit) for unit in units]
        tally = Tally(run.job.keys, ProgressDisplay((), run.log_interval))
        while waiting:
            ready, waiting = ray.wait(waiting)
            for totals in ray.get(ready):
                tally.totals.join(totals)
                tally.progress.show(tally.totals)
    except Exception as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause or error, (MegazeroError, Disagreement)):
            raise (cause or error) from error
        raise DataError(
            f"`--executor ray` must have a cluster that finishes its tasks, but {type(error).__name__}: "
            f"{str(error).strip().splitlines()[0]}; run again, which keeps the units that are whole."
        ) from error
    finally:
        ray.shutdown()
