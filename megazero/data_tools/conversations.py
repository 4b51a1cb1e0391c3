"""Turn conversations into an indexed dataset in which only the answers count in the loss.

`megazero data conversations --input f.jsonl --output-prefix p --tokenizer-model DIR`

Each line or row is an object in one of the usual forms, recognized line by line: messages (OpenAI, TRL),
ShareGPT, Alpaca, or prompt and completion. The tokenizer's chat template makes a text of it. The output is
`p.bin`, `p.idx` and `p.mask`, a byte for each token: 1 for answers and what ends them, 0 for all else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BytesIO
from typing import TypeVar

import numpy as np

from megazero.data_tools import cli
from megazero.errors import DataError

R = TypeVar("R")

_SHOWN = 10


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Build a parser of the flags."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="JSON lines, Parquet or Arrow")
    add("--output-prefix", required=True, metavar="PREFIX", help="path of the output without suffix")
    add("--tokenizer-model", required=True, metavar="PATH", help="tokenizer.json or its directory")
    add("--chat-template", metavar="FILE", help="a jinja template to use instead of the tokenizer's")
    add("--max-tokens", type=cli.positive_int, metavar="N", help="cut off what is behind N tokens of a row")
    add("--on-bad-line", choices=("stop", "skip"), default="stop", help="what to do about a bad line (stop)")
    add("--allow-special-tokens", action="store_true", help="messages may name special tokens, and mean them")
    return parser


def convert(args: argparse.Namespace) -> None:
    """Convert, and print a summary. DataError, and no output, for a bad line or without an answer."""
    from megazero.data.conversations.answers import ConversationEncoder
    from megazero.data.conversations.rows import read_row
    from megazero.data.indexed.format import dtype_for_vocab
    from megazero.data.indexed.writer import IndexedDatasetWriter

    paths, bad = cli.expand_inputs(args.input), list[str]()
    special, skips = args.allow_special_tokens, args.on_bad_line == "skip"
    encoder = ConversationEncoder(args.tokenizer_model, args.chat_template, allow_special=special)
    cut = dropped = counted = 0
    with IndexedDatasetWriter(args.output_prefix, dtype_for_vocab(encoder.vocab_size)) as writer:
        lines, remedy = lines_of(paths, goes_on=skips), "correct the line or pass `--on-bad-line skip`"
        for whole, mask in read_each(
            lines, lambda line: encoder.encode(read_row(line)), remedy, bad if skips else None
        ):
            ids, counts = whole[: args.max_tokens], mask[: args.max_tokens]
            cut += ids.size < whole.size
            if not counts.any():
                dropped += 1
                continue
            writer.add_raw(ids, np.array([ids.size]), mask=counts)
            counted += int(counts.sum())
        if not writer.documents:
            raise DataError(
                f"`--input` must hold an answer that counts, but {dropped:,} lines hold none and "
                f"{len(bad):,} are bad; nothing was written."
            )
    print(f"{args.output_prefix}: {writer.documents:,} conversations, {writer.tokens:,} tokens")
    print(f"  counted  {counted:,} tokens ({counted / writer.tokens:.1%})")
    print(f"  cut off  {cut:,} at --max-tokens")
    print(f"  dropped  {dropped:,} without a counted token")
    if bad:
        print(f"skipped {len(bad):,} bad lines; the first:", *bad[:_SHOWN], sep="\n  ", file=sys.stderr)


def read_each(
    lines: Iterable[tuple[str, bytes | int]],
    read: Callable[[bytes], R],
    remedy: str = "correct the line",
    bad: list[str] | None = None,
) -> Iterator[R]:
    """Yield what `read` makes of lines that are not blank; bad ones go to `bad`, or raise DataError."""
    from megazero.data.conversations.rows import BadRow

    for place, line in lines:
        try:
            if isinstance(line, int):
                raise BadRow(f"it has more than {line >> 20} MiB")
            if line.strip():
                yield read(line)
        except (BadRow, RecursionError) as error:
            if bad is None:
                raise DataError(f"{place}: {error}; {remedy}.") from error
            bad.append(f"{place}: {error}")


def lines_of(paths: Sequence[str], *, goes_on: bool) -> Iterator[tuple[str, bytes | int]]:
    """Yield each line's place and bytes, or the limit that it exceeds; rows of tables as lines of JSON."""
    from megazero.data_tools.preprocessing.chunks import cut
    from megazero.data_tools.preprocessing.inputs import is_table, kind_of
    from megazero.data_tools.preprocessing.tables import whole_rows

    for path in paths:
        kind, number = kind_of(path), 0
        if is_table(kind):
            for row in whole_rows(path, kind):
                number += 1
                yield f"{path}, row {number}", json.dumps(row, ensure_ascii=False, default=str).encode()
            continue
        for chunk in cut([path], goes_on=goes_on):
            lines: Iterable[bytes | int] = BytesIO(chunk.read()) if chunk.beyond is None else [chunk.beyond]
            for line in lines:
                number += 1
                yield f"{chunk.path}, line {number}", line


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the tool; returns 0 if the dataset is whole, else an error's status and leaves no dataset."""
    return cli.run(convert, build_parser(prog).parse_args(argv))
