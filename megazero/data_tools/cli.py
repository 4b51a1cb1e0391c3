"""The parts that data tools share: exit status, tokenizer flags, and input files."""

from __future__ import annotations

import argparse
import glob
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NamedTuple

from megazero.data.tokenizers.build import TOKENIZER_KINDS, TokenizerSpec
from megazero.errors import DataError, MegazeroError
from megazero.regular_file import read_regular


class Terminated(BaseException):
    """SIGTERM arrived; unwinds like KeyboardInterrupt, so that temporary files and workers are removed."""


def run(
    tool: Callable[[argparse.Namespace], None],
    args: argparse.Namespace,
    left: str = "nothing was left behind",
) -> int:
    """Run the tool; returns 0, an error's own code, 1 for disk errors, or 130/143 after a signal.

    After a signal, `left` tells the user what remains.
    """
    previous = _on_sigterm()
    try:
        tool(args)
    except MegazeroError as error:
        return _fail(str(error), error.exit_code)
    except OSError as error:
        return _fail(f"the operating system refused: {error}.", 1)
    except KeyboardInterrupt:
        return _fail(f"interrupted; {left}.", 130)
    except Terminated:
        return _fail(f"terminated; {left}.", 143)
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)
    return 0


def _on_sigterm() -> Callable[[int, FrameType | None], object] | int | None:
    """Make SIGTERM raise `Terminated`; returns the previous handler, or None if it cannot be set."""

    def unwind(number: int, frame: FrameType | None) -> None:
        raise Terminated

    try:
        return signal.signal(signal.SIGTERM, unwind)
    except ValueError:  # only the main thread may set handlers; a caller on another thread keeps its own
        return None


def _fail(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status


def expand_inputs(patterns: Sequence[str]) -> list[str]:
    """The files of these paths and globs, in their order, a glob's sorted; `-` is standard input.

    A folder that `save_to_disk` of Hugging Face's datasets has written stands for its files. Raises DataError
    for a pattern that matches none.
    """
    paths: list[str] = []
    for pattern in patterns:
        if pattern == "-":
            paths.append(pattern)
            continue
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        files = [file for path in matches for file in ([path] if os.path.isfile(path) else _saved(path))]
        if not files:
            what = "is a directory" if os.path.isdir(pattern) else "matches no file"
            what = "is not a regular file" if os.path.exists(pattern) and not os.path.isdir(pattern) else what
            raise DataError(f"`--input` must name existing files, but {pattern} {what}; correct the path.")
        paths += files
    if paths.count("-") > 1:
        raise DataError("`--input` must name standard input once, but has `-` twice; leave one out.")
    return paths


def _saved(folder: str) -> list[str]:
    """The Arrow files of a dataset that was saved to disk, in their order; none of any other path."""
    try:
        state = json.loads(read_regular(os.path.join(folder, "state.json")))
        files = [os.path.join(folder, file["filename"]) for file in state["_data_files"]]
    except OSError:
        splits = sorted(glob.glob(os.path.join(glob.escape(folder), "*", "state.json")))
        if splits:
            names = ", ".join(os.path.dirname(path) for path in splits)
            raise DataError(f"`--input` must name one split, but {folder} has {names}; name it.") from None
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"`{folder}/state.json` must list the files of a saved dataset, but does not ({error!r}); save "
            "it again."
        ) from error
    missing = next((path for path in files if not os.path.isfile(path)), None)
    if missing is not None or state.get("_indices_data_files") or state.get("_indices_files"):
        why = "lists rows by an index of its own" if missing is None else f"lacks {missing}"
        raise DataError(f"`{folder}` must be a whole saved dataset, but {why}; save it again.")
    return files


def add_tokenizer_flags(parser: argparse.ArgumentParser, required: bool) -> None:
    """Add Megatron's flags that choose a tokenizer."""
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type", required=required, choices=TOKENIZER_KINDS, help="kind of tokenizer"
    )
    group.add_argument("--vocab-file", metavar="FILE", help="vocab.json (GPT-2) or vocab.txt (BERT)")
    group.add_argument("--merge-file", metavar="FILE", help="merges.txt (GPT-2)")
    group.add_argument(
        "--tokenizer-model", metavar="PATH", help="SentencePiece .model, or tokenizer.json or its directory"
    )
    size = "vocabulary size of NullTokenizer"
    group.add_argument("--vocab-size", type=positive_int, metavar="N", help=size)
    group.add_argument(
        "--vocab-extra-ids", type=int, default=0, metavar="N", help="sentinel tokens after the vocabulary"
    )


def tokenizer_spec(args: argparse.Namespace) -> TokenizerSpec:
    """The tokenizer that the flags of `add_tokenizer_flags` describe."""
    return TokenizerSpec(
        kind=args.tokenizer_type,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        model=args.tokenizer_model,
        vocab_size=args.vocab_size,
        extra_ids=args.vocab_extra_ids,
    )


class Shard(NamedTuple):
    """One of `shards` machines or jobs, by its number from 0."""

    number: int
    shards: int


def shard(text: str) -> Shard:
    """An argparse type: I/N, the number of a shard from 0 and how many there are."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(f"must be I/N with I in 0..N-1, but is {text}")
    return Shard(int(number), int(count))


def positive_int(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but is {number}")
    return number
