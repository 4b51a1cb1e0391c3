"""Merge several indexed datasets into one.

`megazero data merge --input DIR_OR_PREFIX ... --output-prefix p`: a directory stands for all
its datasets, sorted by name. Documents keep their order; the datasets must have the same dtype.
A folder of units, which `preprocess --shard` has made, is joined in the order of its input.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megazero.data_tools import cli
from megazero.errors import DataError


def input_prefixes(inputs: Sequence[str], output: str) -> list[str]:
    """The prefixes of the datasets to merge, without the output's own in a directory.

    Raises DataError if a directory has no dataset, a prefix is named twice, or the output is an input.
    """
    prefixes: list[str] = []
    for name in inputs:
        if not Path(name).is_dir():
            prefixes.append(name)
            continue
        inside = [str(path)[: -len(".idx")] for path in sorted(Path(name).glob("*.idx"))]
        inside = [prefix for prefix in inside if Path(prefix).resolve() != Path(output).resolve()]
        if not inside:
            raise DataError(f"`--input` must name datasets, but the directory {name} holds no .idx file.")
        prefixes += inside
    twice = next((prefix for i, prefix in enumerate(prefixes) if prefix in prefixes[:i]), None)
    if twice is not None:
        raise DataError(f"`--input` must name each dataset once, but names {twice} twice.")
    if any(Path(prefix).resolve() == Path(output).resolve() for prefix in prefixes):
        raise DataError(f"`--output-prefix` must be a new dataset, but {output} is one of the inputs.")
    return prefixes


def merge_datasets(args: argparse.Namespace) -> None:
    """Merge, and print what each input contributed."""
    from megazero.data.indexed.reader import open_indexed
    from megazero.data.indexed.writer import IndexedDatasetWriter

    folders = [name for name in args.input if any(Path(name).glob("plan-*.json"))]
    if folders:
        _merge_units(args, folders[0])
        return
    if args.bad_lines is not None:
        raise DataError("`--bad-lines` must come with a folder of units, but there is none; leave it out.")
    prefixes = input_prefixes(args.input, args.output_prefix)
    with IndexedDatasetWriter(args.output_prefix, open_indexed(prefixes[0]).dtype) as writer:
        for prefix in prefixes:
            before = writer.documents, writer.tokens
            writer.append_dataset(prefix)
            documents, tokens = writer.documents - before[0], writer.tokens - before[1]
            print(f"{prefix}: {documents:,} documents, {tokens:,} tokens")
    print(f"{args.output_prefix}: {writer.documents:,} documents, {writer.tokens:,} tokens")


def _merge_units(args: argparse.Namespace, folder: str) -> None:
    from megazero.data_tools.preprocessing.progress import print_skipped
    from megazero.data_tools.preprocessing.units import UnitFolder

    if len(args.input) > 1:
        raise DataError(
            f"`--input` must be one folder of units, but names {len(args.input)} things and {folder} is one; "
            "merge it by itself first."
        )
    units = UnitFolder.existing(folder)
    totals = units.merge(args.output_prefix, args.bad_lines)
    for key, ending in units.plan.outputs.items():
        counts = totals.keys[key]
        print(f"{args.output_prefix}{ending}: {counts.documents:,} documents, {counts.tokens:,} tokens")
    print_skipped(totals)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the tool; returns 0 if the merged dataset is whole."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.split("\n")[0])
    add, text = parser.add_argument, "path of the output without suffix; of units, that of `preprocess`"
    add("--input", nargs="+", required=True, metavar="PATH", help="directories or dataset prefixes")
    add("--output-prefix", required=True, metavar="PREFIX", help=text)
    add("--bad-lines", metavar="FILE", help="of units: list the lines that were skipped")
    return cli.run(merge_datasets, parser.parse_args(argv))
