"""The common parts of commands that run a trained model: parallel sizes, loading the model, reading texts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pydantic import ValidationError

from megazero.config.fields import names_with
from megazero.config.tree.roles import Role
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.errors import ConfigError, DataError
from megazero.inference.coded import CACHE_DTYPES
from megazero.inference.staged import StagedModel
from megazero.models.batch import M, MicroBatch
from megazero.models.chunk import ModelChunk, StagedChunk
from megazero.mpu.launch import Launch, leave, reporting

if TYPE_CHECKING:
    from megazero.formats.megatron.reader import ImportOptions
    from megazero.train.resume.trained import Loaded


_TOKENIZER_FLAGS = ("tokenizer_type", *names_with(Role.FILE, "tokenizer"))


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the parallel sizes of the job, and for folders of other libraries."""
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
    parser.add_argument(
        "--expert-model-parallel-size", type=int, default=1, help="slices of the experts (default: 1)"
    )
    parser.add_argument("--ckpt-step", type=int, help="iteration to load (default: the newest)")
    parser.add_argument(
        "--trust-pickle", action="store_true", help="read a checkpoint of Megatron, whose files are pickles"
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        help="entries of a Megatron checkpoint's vocabulary; default: its tokenizer's",
    )
    for name in _TOKENIZER_FLAGS:
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, help="for a folder of another library that does not name its tokenizer")


def add_cache(parser: argparse._ActionsContainer) -> None:
    """Add the flag for how keys and values are kept."""
    parser.add_argument(
        "--kv-cache-dtype",
        choices=CACHE_DTYPES,
        default="auto",
        help="how keys and values are kept: in the model's dtype, or in 8 bits (default auto)",
    )


def import_options(flags: argparse.Namespace) -> ImportOptions:
    """How to read a folder of another library, from the flags of `add_sizes`.

    Raises ConfigError if they name no tokenizer of ours.
    """
    from megazero.formats.megatron.reader import ImportOptions

    values = {name: getattr(flags, name) for name in _TOKENIZER_FLAGS}
    try:
        tokenizer = TokenizerConfig(**values).located() if any(values.values()) else None
    except ValidationError as error:
        raise ConfigError([f"`{fault['loc'][0]}`: {fault['msg']}" for fault in error.errors()]) from error
    return ImportOptions(flags.trust_pickle, flags.vocab_size, tokenizer=tokenizer)


@contextmanager
def loaded_model(
    flags: argparse.Namespace,
    launch: Launch,
    verb: str,
    part: Callable[[ModelChunk[MicroBatch]], StagedChunk[M]],
    *,
    replicas: bool = False,
) -> Iterator[tuple[Loaded, StagedModel[M]]]:
    """Join the job and load this rank's part of the checkpoint in `flags.load`; leave the job at the end.

    The first rank prints remarks about the checkpoint.

    Args:
        flags: the parsed flags of the command.
        launch: this rank's place in the job.
        verb: the command's name, for messages.
        part: returns a chunk as a model that the command can run, or raises an error.
        replicas: whether ranks that the sizes leave hold further copies of the model (see `Share`).

    Raises:
        MegazeroError: the checkpoint cannot be loaded on this job, or the command cannot run its model.
    """
    # This imports every part of megazero, so it waits until the flags are known to be good.
    from megazero.train.resume.trained import AxisSizes, load_for_inference

    sizes = AxisSizes(
        flags.tensor_model_parallel_size,
        flags.pipeline_model_parallel_size,
        flags.context_parallel_size,
        flags.expert_model_parallel_size,
        replicas,
    )
    options, step = import_options(flags), flags.ckpt_step
    loaded = load_for_inference(flags.load, launch, sizes, verb=verb, options=options, step=step)
    with reporting(loaded.context):
        if loaded.context.rank == 0:
            for remark in loaded.remarks:
                print(f"warning: {remark}", file=sys.stderr)
        parts = {number: part(chunk) for number, chunk in loaded.chunks.items()}
        coded = getattr(flags, "kv_cache_dtype", "auto") == "int8"  # commands without a cache have no flag
        groups = loaded.context.pp, loaded.sharers
        yield loaded, StagedModel(parts, loaded.stage_of, *groups, coded_cache=coded)
    leave(loaded.context)


def check_texts(texts: list[str], flag: str) -> list[str]:
    """Return `texts`, the values of a flag.

    Raises DataError if a text contains bytes that are not UTF-8, which Python decodes as lone surrogates.
    """
    for number, text in enumerate(texts, 1):
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise DataError(f"`{flag}` must be UTF-8, but number {number} is {text!r}; convert it")
    return texts


def decode_lines(content: bytes, what: str, place: str) -> list[str]:
    """The lines of a UTF-8 text; `what` names the text and `place` the file in messages.

    Raises DataError if a line is not UTF-8.
    """
    # Not by str.splitlines, which also splits at characters that a prompt may contain.
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
