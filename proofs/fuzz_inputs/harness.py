"""Runs cases in forked workers, each with a time limit, and says what became of every one.

A case is a function of (kind, seed, number) alone: a valid sample, and mutations of some of its files. What
reads it runs in a worker, because a reader may hang, or end the process.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import random
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from megazero.errors import MegazeroError
from proofs.fuzz_inputs.mutate import BYTES, Mutation

REFUSED, SAME = "refused", "accepted, same meaning"
CHANGED, TRACEBACK, HANG = "accepted, changed meaning", "traceback", "hang"
CRASH, UNFIT = "crash", "unfit message"
OUTCOMES = (REFUSED, SAME, CHANGED, TRACEBACK, HANG, CRASH, UNFIT)
WRONG = OUTCOMES[2:]
LONGEST_LINE = 2000  # characters
PATIENCE = 12  # a case that waits instead of working hangs after this many limits


@dataclass(frozen=True)
class Sample:
    """A valid input.

    Attributes:
        name: what it is called in reports.
        files: name -> content.
        mutated: names of the files that are mutated, with the structure-aware mutations of each.
    """

    name: str
    files: Mapping[str, bytes]
    mutated: Mapping[str, Sequence[Mutation]]


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    Attributes:
        name: its name.
        samples: makes the valid inputs; the folder is theirs to work in.
        read: reads the files of a sample from a folder as the product does, and uses what it read. Raises
            MegazeroError if the product refuses.
        compare: reads the same files independently; returns what `read` understood otherwise, or None.
    """

    name: str
    samples: Callable[[Path], list[Sample]]
    read: Callable[[Path, Sample], Any]
    compare: Callable[[Path, Sample, Any], str | None]


@dataclass(frozen=True)
class Case:
    """One mutated input."""

    number: int
    sample: Sample
    files: Mapping[str, bytes]

    @cached_property
    def changed(self) -> bool:
        """Whether the mutations changed any byte."""
        return self.files != self.sample.files

    def write(self, folder: Path) -> None:
        """Put the files into an empty folder."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)


@dataclass(frozen=True)
class Finding:
    """What became of a case.

    `detail` says more: the refusal, the difference or the traceback. `seconds` are of the processor, those of
    ended children included.
    """

    kind: str
    number: int
    sample: str
    outcome: str
    detail: str
    seconds: float


def make_case(samples: Sequence[Sample], seed: int, number: int) -> Case:
    """The case of this number; 0 to len(samples) - 1 are the samples themselves."""
    sample = samples[number % len(samples)]
    if number < len(samples):
        return Case(number, sample, sample.files)
    rng = random.Random(f"{seed}:{number}")
    files = dict(sample.files)
    for _ in range(rng.choice((1, 1, 1, 1, 2))):
        name = rng.choice(list(sample.mutated))
        # A file that a first mutation has spoiled has no structure any more.
        whole = files[name] == sample.files[name]
        aware = whole and rng.random() < 0.7 and sample.mutated[name]
        files[name] = rng.choice(sample.mutated[name] if aware else BYTES)(files[name], rng)
    return Case(number, sample, files)


def judge(kind: Kind, case: Case, folder: Path) -> tuple[str, str]:
    """(outcome, detail) of a case; hangs and crashes are for the caller to see."""
    outcome, detail = _read(kind, case, folder)
    if outcome != SAME and not case.changed:
        return CHANGED, f"the sample itself: {outcome}: {detail}"
    return outcome, detail


def _read(kind: Kind, case: Case, folder: Path) -> tuple[str, str]:
    case.write(folder)
    noise = io.StringIO()
    try:
        with contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
            found = kind.read(folder, case.sample)
    except MegazeroError as error:
        unfit = unfitness(str(error))
        return (UNFIT, f"{unfit}: {str(error)!r:.600}") if unfit else (REFUSED, str(error))
    except BaseException:  # Rust's panics and SystemExit are no Exceptions
        return TRACEBACK, traceback.format_exc(limit=-6)
    try:
        difference = kind.compare(folder, case.sample, found)
    except Exception:
        difference = f"the other reader refuses: {traceback.format_exc(limit=-3)}"
    return (SAME, "") if difference is None else (CHANGED, difference)


def unfitness(message: str) -> str | None:
    """Why a message is not fit for a user, or None: it must be printable lines of bounded length."""
    lines = message.split("\n")
    if not message or not all(line.strip() for line in lines):
        return "it has an empty line"
    if not all(line.isprintable() for line in lines):
        return "it is not printable"
    if max(map(len, lines)) > LONGEST_LINE:
        return f"it has a line of {max(map(len, lines))} characters"
    return None


def _serve(pipe: Connection, kind: Kind, samples: Sequence[Sample], seed: int, folder: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # native libraries print there what they also raise
    while True:
        number = pipe.recv()
        if number is None:
            return
        case = make_case(samples, seed, number)
        pipe.send(None)  # the clock starts when the case is made
        begin = sum(os.times()[:4])
        outcome, detail = judge(kind, case, folder)
        pipe.send(Finding(kind.name, number, case.sample.name, outcome, detail, sum(os.times()[:4]) - begin))


def _processor_seconds(pid: int) -> float:
    """What a process and its ended children have used, as Linux tells."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class _Worker:
    """A forked process that judges one case at a time; it is replaced when it has hung or died."""

    def __init__(self, kind: Kind, samples: Sequence[Sample], seed: int, folder: Path):
        self._fork = lambda pipe: multiprocessing.get_context("fork").Process(
            target=_serve, args=(pipe, kind, samples, seed, folder), daemon=True
        )
        self._kind, self._samples = kind, samples
        self.number = -1
        self.deadline = self._latest = float("inf")
        self._used = 0.0
        self._start()

    def _start(self) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self._process = self._fork(theirs)
        self._process.start()
        theirs.close()

    def give(self, number: int) -> None:
        """Send a case."""
        self.number, self.deadline = number, float("inf")
        self.pipe.send(number)

    def take(self, limit: float) -> Finding | None:
        """The finding, or None if there is none yet."""
        now = time.monotonic()
        if now > self.deadline:
            # Other programs may have had the processor.
            left = limit - (_processor_seconds(self._process.pid) - self._used)
            if left <= 0 or now > self._latest:
                return self._replaced(HANG, f"no answer after {limit} s", limit)
            self.deadline = now + left
        if not self.pipe.poll():
            return None
        try:
            found = self.pipe.recv()
        except EOFError:
            self._process.join()
            return self._replaced(CRASH, f"the process ended with status {self._process.exitcode}", 0.0)
        if found is None:
            self.deadline, self._latest = now + limit, now + PATIENCE * limit
            self._used = _processor_seconds(self._process.pid)
        return found

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self.pipe.close()

    def _replaced(self, outcome: str, detail: str, seconds: float) -> Finding:
        self.stop()
        self._start()
        sample = self._samples[self.number % len(self._samples)].name
        return Finding(self._kind.name, self.number, sample, outcome, detail, seconds)


def run(
    kind: Kind, numbers: Sequence[int], seed: int, folder: Path, jobs: int = 1, limit: float = 5.0
) -> Iterator[Finding]:
    """The findings of these cases, as they come.

    Args:
        kind: what is read.
        numbers: which cases.
        seed: of the mutations.
        folder: an empty folder to work in.
        jobs: the number of processes.
        limit: seconds of the processor that reading a case may take.
    """
    (folder / "samples").mkdir(parents=True)
    samples = kind.samples(folder / "samples")
    left = iter(numbers)
    workers = [_Worker(kind, samples, seed, folder / f"worker{i}") for i in range(jobs)]
    busy = []
    try:
        for worker, number in zip(workers, left, strict=False):
            worker.give(number)
            busy.append(worker)
        while busy:
            first = min(worker.deadline for worker in busy)
            wait([worker.pipe for worker in busy], min(1.0, max(0.0, first - time.monotonic())))
            for worker in list(busy):
                found = worker.take(limit)
                if found is None:
                    continue
                yield found
                number = next(left, None)
                if number is None:
                    busy.remove(worker)
                else:
                    worker.give(number)
    finally:
        for worker in workers:
            worker.stop()
