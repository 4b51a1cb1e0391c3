"""One run: chunks go through the encoders into one indexed dataset per key, all whole or none visible."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

from data_tools.preprocessing.chunks import CHUNK_BYTES, Problem, cut
from data_tools.preprocessing.encode import KEPT_PROBLEMS, EncodedChunk, EncodeJob
from data_tools.preprocessing.pool import Crew, SoloCrew
from data_tools.preprocessing.progress import Progress, Totals
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.errors import DataError


@dataclass(frozen=True)
class PreprocessRun:
    """The inputs and outputs of a run. `log_interval` is in documents."""

    paths: tuple[str, ...]
    prefix: str
    job: EncodeJob
    workers: int = 1
    log_interval: int = 100_000
    chunk_bytes: int = CHUNK_BYTES

    def outputs(self) -> dict[str, str]:
        """The dataset prefix of each key, named as Megatron names them."""
        return {key: f"{self.prefix}_{key}_document" for key in self.job.keys}


@dataclass(frozen=True)
class Outcome:
    """What was done, by which encoder, and in how many seconds."""

    totals: Totals
    encoder: str
    seconds: float


class _Disagreement(Exception):
    """The fast encoder was wrong somewhere; the run starts again without it."""


def preprocess(run: PreprocessRun) -> Outcome:
    """Runs to the end. The output does not depend on the number of workers.

    Raises DataError for bad lines (unless skipped), unfit tokenizers, a killed worker or a disk that refuses;
    nothing is visible then.
    """
    progress = Progress(run.paths, run.log_interval)
    try:
        totals, encoder = _attempt(run, progress)
    except _Disagreement as disagreement:
        print(f"note: {disagreement}; starting again with the slower tokenizer itself.", file=sys.stderr)
        totals, encoder = _attempt(replace(run, job=replace(run.job, fast=False)), progress)
    return Outcome(totals, encoder, progress.seconds())


def _attempt(run: PreprocessRun, progress: Progress) -> tuple[Totals, str]:
    totals = Totals(run.job.keys)
    with ExitStack() as stack:
        crew = stack.enter_context(_crew(run))
        facts = crew.facts
        if facts.reason is not None:
            print(
                f"note: encoding with the slower {facts.tokenizer} itself: {facts.reason}.", file=sys.stderr
            )
        # Started only now: the bar draws on a thread, and a process with threads cannot fork its workers.
        stack.enter_context(progress)
        writers = [
            stack.enter_context(IndexedDatasetWriter(prefix, facts.dtype))
            for prefix in run.outputs().values()
        ]
        for chunk, first_line in _with_line_numbers(crew.results(cut(run.paths, run.chunk_bytes))):
            if chunk.disagreement is not None:
                raise _Disagreement(f"{facts.fast} and {facts.tokenizer} differ in {chunk.disagreement}")
            if chunk.problems and not run.job.skip_bad_lines:
                problem = _describe(chunk.path, first_line, chunk.problems[0])
                raise DataError(f"{problem}; correct the line or pass `--on-error skip`.")
            _note_problems(totals, chunk, first_line)
            totals.add(chunk)
            for writer, column in zip(writers, chunk.columns, strict=True):
                writer.add_raw(column.tokens, column.lengths, column.document_lengths)
            progress.show(totals)
        _require_documents(totals)
    return totals, facts.fast or facts.tokenizer


def _crew(run: PreprocessRun) -> SoloCrew | Crew:
    # `--workers` alone decides how many cores are used, and no library should have threads when we fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return SoloCrew(run.job) if run.workers == 1 else Crew(run.job, run.workers, run.chunk_bytes)


def _require_documents(totals: Totals) -> None:
    for key in totals.keys:
        if not totals.documents[key]:
            raise DataError(
                f"`--input` must hold at least one document under key `{key}`, but holds none in "
                f"{totals.lines} lines ({totals.problems.total()} skipped); nothing was written."
            )


def _with_line_numbers(chunks: Iterator[EncodedChunk]) -> Iterator[tuple[EncodedChunk, int]]:
    """Each chunk with the number (from 1) of its first line in its file."""
    path, line = None, 1
    for chunk in chunks:
        if chunk.path != path:
            path, line = chunk.path, 1
        yield chunk, line
        line += chunk.lines


def _describe(path: str, first_line: int, problem: Problem) -> str:
    return f"{path}, line {first_line + problem.line}: {problem.reason}: {problem.detail}"


def _note_problems(totals: Totals, chunk: EncodedChunk, first_line: int) -> None:
    room = KEPT_PROBLEMS - len(totals.first_problems)
    totals.first_problems += [_describe(chunk.path, first_line, problem) for problem in chunk.problems[:room]]
