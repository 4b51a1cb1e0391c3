"""Convert texts to Megatron's indexed dataset.

`megazero data preprocess --input f.jsonl --output-prefix p --tokenizer-type ... --append-eod`

Inputs are JSON lines (plain, or packed by gzip, zstd, bzip2 or xz), Parquet or Arrow. The value of each of
`--json-keys` is a document's text, or a list of texts, one per sequence of the document. The output is
`{prefix}_{key}_document.bin` and `.idx`. With `--split-sentences`, each sentence of a text is a sequence, and
`_document` becomes `_sentence`. The output depends on the input, the tokenizer and the rules for sentences,
and not on `--workers`, `--partitions`, `--shard` or `--executor`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megazero.data_tools import cli
from megazero.errors import DataError

if TYPE_CHECKING:
    from megazero.data_tools.preprocessing.pipeline import PreprocessRun


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Build a parser of the flags, named as in Megatron."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.split("\n")[0])
    add, count = parser.add_argument, cli.positive_int
    text = (
        "files or globs: JSON lines (plain, gzip, zstd, bzip2, xz), Parquet, Arrow, folders that `datasets` "
    )
    add("--input", nargs="+", required=True, metavar="FILE", help=f"{text}saved; - is standard input")
    add("--output-prefix", required=True, metavar="PREFIX", help="path of the output without suffix")
    text = "keys to take text from; a.b is the key b in a"
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help=text)
    cli.add_tokenizer_flags(parser, required=True)
    add("--append-eod", action="store_true", help="end each document with the tokenizer's eod")
    _add_sentence_flags(parser)
    _add_unit_flags(parser)
    add("--workers", type=count, default=1, metavar="N", help="processes that tokenize")
    text = "end the run if a worker takes longer for a chunk of 2 MiB, or for one long line (30)"
    add("--worker-timeout", type=count, default=30, metavar="MINUTES", help=text)
    text = "parts of the input that are read and written at once, each by `--workers` / N processes"
    add("--partitions", type=count, default=1, metavar="N", help=text)
    text = "documents keep their order in the input; they do so without this too"
    add("--keep-sequential-samples", action="store_true", help=text)
    choices, text = ("stop", "skip"), "what to do about a bad line (default: stop)"
    add("--on-bad-line", "--on-error", dest="on_bad_line", choices=choices, default="stop", help=text)
    text = "set skipped lines aside: file, line and reason, as JSON lines"
    add("--bad-lines", metavar="FILE", help=text)
    text = "megabytes (MiB) that a line may have, unpacked; a longer one is a bad line (256)"
    add("--max-line-mib", type=count, default=256, metavar="N", help=text)
    add("--log-interval", type=count, default=100_000, metavar="N", help="documents between log lines")
    text = "kind of dataset; mmap is the one Megatron trains on"
    add("--dataset-impl", choices=("mmap",), default="mmap", help=text)
    return parser


def _add_sentence_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sentences").add_argument
    text = "make each sentence of a text a sequence, for BERT"
    add("--split-sentences", action="store_true", help=text)
    add("--keep-newlines", action="store_true", help="leave the whitespace after a sentence at its end")
    text = "language of the texts, as a name or a code (default: english)"
    add("--lang", metavar="LANGUAGE", help=text)


def _add_unit_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("many machines").add_argument
    text = "make share I (from 0) of N of the units in PREFIX.units; a rerun keeps what is whole"
    add("--shard", type=cli.shard, metavar="I/N", help=text)
    add("--merge", action="store_true", help="join the units of all shards, made with the same flags")
    text = "megabytes (MiB) of input in a unit, as far as the files can be divided (256)"
    add("--unit-mib", type=cli.positive_int, default=256, metavar="N", help=text)
    text = "who makes the units (default: local)"
    add("--executor", choices=("local", "ray"), default="local", help=text)
    text = "a cluster of Ray; auto is the one that this machine is in (default: local, one of --workers)"
    add("--ray-address", default="local", metavar="ADDRESS", help=text)


def _check(args: argparse.Namespace) -> None:
    """Raise DataError for flags that exclude each other."""
    keys = args.json_keys
    if len(set(keys)) != len(keys):
        raise DataError(f"`--json-keys` must name each key once, but is {' '.join(keys)}.")
    for key in (key for key in keys if os.sep in key):
        raise DataError(f"`--json-keys` must fit into a file name, but one is {key}; rename it in the jsonl.")
    if args.workers % args.partitions:
        raise DataError(
            f"`--workers` must be a multiple of `--partitions` ({args.partitions}), but is {args.workers}; "
            f"set it to {-(-args.workers // args.partitions) * args.partitions}."
        )
    if args.bad_lines is not None and args.on_bad_line == "stop":
        raise DataError("`--bad-lines` must come with `--on-bad-line skip`, but does not; add that.")
    ways = {"--shard": args.shard is not None, "--merge": args.merge, "--executor": args.executor == "ray"}
    others = {
        "--partitions": args.partitions > 1,
        "--input -": "-" in args.input,
        "--bad-lines": args.bad_lines is not None and args.shard is not None,
    }
    chosen = [flag for flag, is_set in ways.items() if is_set]
    if len(chosen) > 1:
        raise DataError(f"`{chosen[0]}` must come without `{chosen[1]}`, but both are given; leave one out.")
    for flag in (flag for flag, is_set in others.items() if is_set and chosen):
        raise DataError(
            f"`{chosen[0]}` must come without `{flag}`, but both are given; leave `{flag}` out"
            + (", and give it to `--merge`." if flag == "--bad-lines" else ".")
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
        skip_bad_lines=args.on_bad_line == "skip",
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
    if args.shard is not None or args.merge or args.executor == "ray":
        _by_units(run, args)
        return
    result = preprocess(run, args.bad_lines)
    print_table(result.totals, run.outputs(), result.encoder, result.seconds, sentences=args.split_sentences)


def _by_units(run: PreprocessRun, args: argparse.Namespace) -> None:
    """Make units, or merge them, or both."""
    import shutil
    import time

    from megazero.data_tools.preprocessing.progress import print_table
    from megazero.data_tools.preprocessing.shards import make_units
    from megazero.data_tools.preprocessing.units import UnitFolder, UnitPlan

    started = time.perf_counter()
    plan = UnitPlan.of(run, args.unit_mib << 20)
    folder = UnitFolder(f"{run.prefix}.units", plan)
    if args.shard is not None:
        units = plan.share(args.shard)
        make_units(run, folder, units)
        left = len(folder.missing(plan.units))
        number, shards = args.shard
        rest = f"{left:,} of all {len(plan.units):,} are missing" if left else "`--merge` can join them"
        print(f"shard {number} of {shards}: {len(units):,} units are whole in {folder.path}; {rest}")
        return
    if args.executor == "ray":
        make_units(run, folder, plan.units, args.ray_address)
    totals = UnitFolder(folder.path, plan).merge(run.prefix, args.bad_lines)
    seconds = time.perf_counter() - started
    print_table(totals, run.outputs(), "all shards", seconds, sentences=args.split_sentences)
    if args.executor == "ray":
        shutil.rmtree(folder.path)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the tool; returns 0 if the datasets are whole, else an error's status and leaves no dataset."""
    args = build_parser(prog).parse_args(argv)
    units = args.shard is not None or args.executor == "ray"
    left = "units that are whole are kept: the same command goes on from there"
    return cli.run(preprocess_data, args, left if units else "nothing was left behind")
