"""The parts that all commands with a trained model share: flags for its sizes, texts, and the job itself."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megazero.errors import DataError
from megazero.inference.staged import StagedModel
from megazero.models.batch import M, MicroBatch
from megazero.models.chunk import ModelChunk, StagedChunk
from megazero.mpu.launch import Launch, leave, reporting

if TYPE_CHECKING:
    from megazero.train.resume.trained import Loaded


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The flags for the sizes of the job."""
    for axis, what in (("tensor", "slices of each layer"), ("pipeline", "stages")):
        parser.add_argument(
            f"--{axis}-model-parallel-size",
            type=int,
            help=f"{what} over the ranks of this job (default: as trained, or 1 for a single process)",
        )
    parser.add_argument(
        "--context-parallel-size",
        type=int,
        default=1,
        help="ranks that share the keys and values of a sequence (default: 1)",
    )


@contextmanager
def loaded_model(
    flags: argparse.Namespace,
    launch: Launch,
    verb: str,
    part: Callable[[ModelChunk[MicroBatch]], StagedChunk[M]],
) -> Iterator[tuple[Loaded, StagedModel[M]]]:
    """The checkpoint in the folder `flags.load`, on this rank of a job that lasts as long as the context.

    The first rank prints the remarks. `verb` is the command that the model is for, and `part` returns a
    chunk as one of the models that the command can run.

    Raises:
        MegazeroError: the checkpoint cannot be loaded on this job, or its model is not for this command.
    """
    # This imports every part of megazero, so it waits until the flags are known to be good.
    from megazero.train.resume.trained import AxisSizes, load_for_inference

    context = flags.context_parallel_size
    sizes = AxisSizes(flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size, context)
    loaded = load_for_inference(flags.load, launch, sizes, verb=verb)
    with reporting(loaded.context):
        if loaded.context.rank == 0:
            for remark in loaded.remarks:
                print(f"warning: {remark}", file=sys.stderr)
        parts = {number: part(chunk) for number, chunk in loaded.chunks.items()}
        yield loaded, StagedModel(parts, loaded.stage_of, loaded.context.pp, loaded.sharers)
    leave(loaded.context)


def check_texts(texts: list[str], flag: str) -> list[str]:
    """Return the values of a flag unchanged.

    Raises:
        DataError: one contains bytes that are not UTF-8, which Python passes on as lone surrogates.
    """
    for number, text in enumerate(texts, 1):
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise DataError(f"`{flag}` must be UTF-8, but number {number} is {text!r}; convert it")
    return texts


def decode_lines(content: bytes, what: str, place: str) -> list[str]:
    """The lines of a UTF-8 text.

    Raises:
        DataError: a line is not UTF-8; calls the text `what`, and says in which `place` the line is.
    """
    # Not str.splitlines, which also splits at characters that a prompt may contain.
    lines = content.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    texts = []
    for number, line in enumerate(lines, 1):
        try:
            texts.append(line.removesuffix(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(
                f"{what} must be UTF-8, but {place} line {number} is not: {error.reason}; convert it"
            ) from error
    return texts
