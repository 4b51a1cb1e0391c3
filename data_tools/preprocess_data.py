"""Turns jsonl into Megatron's indexed dataset.

`python data_tools/preprocess_data.py --input f.jsonl --output-prefix p --tokenizer-type ... --append-eod`

One JSON object per line; the value under each of `--json-keys` is a document's text, or a list of texts that
become the document's sequences. Writes `{prefix}_{key}_document.bin` and `.idx`. The bytes written depend on
the input and the tokenizer alone, not on `--workers`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_tools import cli
from megazero.errors import DataError


def build_parser() -> argparse.ArgumentParser:
    """The flags, named as in Megatron."""
    parser = argparse.ArgumentParser(prog="preprocess_data.py", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="FILE", help="jsonl files or globs; gzip is fine"
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="path of the output without suffix"
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to take text from"
    )
    cli.add_tokenizer_flags(parser, required=True)
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with the tokenizer's eod"
    )
    parser.add_argument(
        "--workers", type=cli.positive_int, default=1, metavar="N", help="processes that tokenize"
    )
    parser.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="what to do about a bad line (default: stop)",
    )
    parser.add_argument(
        "--log-interval",
        type=cli.positive_int,
        default=100_000,
        metavar="N",
        help="documents between log lines",
    )
    parser.add_argument(
        "--dataset-impl",
        choices=("mmap",),
        default="mmap",
        help="kind of dataset; mmap is the one Megatron trains on",
    )
    return parser


def preprocess_data(args: argparse.Namespace) -> None:
    """Does what the flags say and prints a summary. Raises DataError; see `pipeline.preprocess`."""
    from data_tools.preprocessing.encode import EncodeJob
    from data_tools.preprocessing.pipeline import PreprocessRun, preprocess
    from data_tools.preprocessing.progress import print_table

    if len(set(args.json_keys)) != len(args.json_keys):
        raise DataError(f"`--json-keys` must name each key once, but is {' '.join(args.json_keys)}.")
    for key in args.json_keys:
        if os.sep in key:
            raise DataError(
                f"`--json-keys` must fit into a file name, but one is {key}; rename it in the jsonl."
            )
    job = EncodeJob(
        cli.tokenizer_spec(args),
        tuple(args.json_keys),
        append_eod=args.append_eod,
        skip_bad_lines=args.on_error == "skip",
    )
    paths = tuple(cli.expand_inputs(args.input))
    run = PreprocessRun(paths, args.output_prefix, job, args.workers, args.log_interval)
    outcome = preprocess(run)
    print_table(outcome.totals, run.outputs(), outcome.encoder, outcome.seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; 0 if the datasets are whole, else an error's status and no dataset."""
    return cli.run(preprocess_data, build_parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
