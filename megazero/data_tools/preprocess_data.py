"""Convert jsonl to Megatron's indexed dataset.

`megazero data preprocess --input f.jsonl --output-prefix p --tokenizer-type ... --append-eod`

Each line is a JSON object; the value of each of `--json-keys` is a document's text, or a list of texts, one
per sequence of the document. The output is `{prefix}_{key}_document.bin` and `.idx`. With
`--split-sentences`, each sentence of a text is a sequence, and `_document` becomes `_sentence`. The output
depends on the input, the tokenizer and the rules for sentences, and not on `--workers` or `--partitions`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from megazero.data_tools import cli
from megazero.errors import DataError


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Build a parser of the flags, named as in Megatron."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.split("\n")[0])
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
    _add_sentence_flags(parser)
    parser.add_argument(
        "--workers", type=cli.positive_int, default=1, metavar="N", help="processes that tokenize"
    )
    parser.add_argument(
        "--worker-timeout",
        type=cli.positive_int,
        default=30,
        metavar="MINUTES",
        help="end the run if a worker takes longer for a chunk of 2 MiB, or for one long line (30)",
    )
    parser.add_argument(
        "--partitions",
        type=cli.positive_int,
        default=1,
        metavar="N",
        help="parts of the input that are read and written at once, each by `--workers` / N processes",
    )
    parser.add_argument(
        "--keep-sequential-samples",
        action="store_true",
        help="documents keep their order in the input; they do so without this too",
    )
    parser.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="what to do about a bad line (default: stop)",
    )
    parser.add_argument(
        "--max-line-mib",
        type=cli.positive_int,
        default=256,
        metavar="N",
        help="megabytes (MiB) that a line may have, unpacked; a longer one is a bad line (256)",
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


def _add_sentence_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sentences")
    group.add_argument(
        "--split-sentences", action="store_true", help="make each sentence of a text a sequence, for BERT"
    )
    group.add_argument(
        "--keep-newlines", action="store_true", help="leave the whitespace after a sentence at its end"
    )
    group.add_argument(
        "--lang", metavar="LANGUAGE", help="language of the texts, as a name or a code (default: english)"
    )


def _check(args: argparse.Namespace) -> None:
    """Raise DataError for flags that exclude each other."""
    if len(set(args.json_keys)) != len(args.json_keys):
        raise DataError(f"`--json-keys` must name each key once, but is {' '.join(args.json_keys)}.")
    for key in args.json_keys:
        if os.sep in key:
            raise DataError(
                f"`--json-keys` must fit into a file name, but one is {key}; rename it in the jsonl."
            )
    if args.workers % args.partitions:
        raise DataError(
            f"`--workers` must be a multiple of `--partitions` ({args.partitions}), but is {args.workers}; "
            f"set it to {-(-args.workers // args.partitions) * args.partitions}."
        )
    for flag, is_set in (("--keep-newlines", args.keep_newlines), ("--lang", args.lang is not None)):
        if is_set and not args.split_sentences:
            raise DataError(
                f"`{flag}` must come with `--split-sentences`, but it does not; add that or leave this out."
            )


def preprocess_data(args: argparse.Namespace) -> None:
    """Convert as the flags say, and print a summary. Raises DataError, as `pipeline.preprocess` does."""
    from megazero.data_tools.preprocessing.encode import EncodeJob
    from megazero.data_tools.preprocessing.pipeline import PreprocessRun, Workers, preprocess
    from megazero.data_tools.preprocessing.progress import print_table
    from megazero.data_tools.preprocessing.sentences import SentenceRules
    from megazero.data_tools.preprocessing.watch import WorkerPatience

    _check(args)
    if args.tokenizer_type.startswith("BertWordPiece") and not args.split_sentences:
        print(
            "note: each text is one sentence; BERT's binary head needs two of each document, which "
            "`--split-sentences` makes.",
            file=sys.stderr,
        )
    rules = SentenceRules(args.lang or "english", args.keep_newlines) if args.split_sentences else None
    job = EncodeJob(
        cli.tokenizer_spec(args),
        tuple(args.json_keys),
        append_eod=args.append_eod,
        skip_bad_lines=args.on_error == "skip",
        sentences=rules,
    )
    paths = tuple(cli.expand_inputs(args.input))
    run = PreprocessRun(
        paths,
        args.output_prefix,
        job,
        Workers(args.workers, args.partitions, WorkerPatience(busy=60.0 * args.worker_timeout)),
        args.log_interval,
        longest_line=args.max_line_mib << 20,
    )
    result = preprocess(run)
    print_table(result.totals, run.outputs(), result.encoder, result.seconds, sentences=args.split_sentences)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the tool; returns 0 if the datasets are whole, else an error's status and leaves no dataset."""
    return cli.run(preprocess_data, build_parser(prog).parse_args(argv))
