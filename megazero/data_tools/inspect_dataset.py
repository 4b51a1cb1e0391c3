"""Show what is in an indexed dataset.

`megazero data inspect PREFIX [--validate] [--document K ...]` prints counts, lengths, and the
sequences (sentences, if the texts were split) per document. Flags add a histogram of document lengths,
document K (as text with a tokenizer), the unigram entropy and the cost of `--pack best-fit`. A damaged
dataset gives an error and exit status 1. With `--write-sums`, a dataset without checksums gets them; an
existing `.sum` that does not agree with the files is an error, and is not changed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from megazero.data_tools import cli

if TYPE_CHECKING:
    from megazero.data.indexed.reader import IndexedDataset


def inspect_dataset(args: argparse.Namespace) -> None:
    """Print what the flags ask for. Raises DataError for a damaged dataset or a missing document."""
    facts = collect(args)
    if args.json:
        print(json.dumps(facts))
    else:
        print_facts(facts)


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """Collect what the flags ask for as a JSON object."""
    from megazero.data.indexed.reader import open_indexed, write_sums
    from megazero.data_tools.dataset_facts import (
        LengthFacts,
        document_lengths,
        histogram,
        packing_costs,
        sequences_per_document,
        unigram_entropy,
    )

    wrote = write_sums(args.prefix) if args.write_sums else None
    dataset = open_indexed(args.prefix)
    documents = document_lengths(dataset)
    per_document = sequences_per_document(dataset)
    facts: dict[str, Any] = {
        "prefix": args.prefix,
        "sequences": len(dataset),
        "documents": len(documents),
        "tokens": dataset.total_tokens,
        "dtype": dataset.dtype.name,
        "bin_bytes": dataset.path_bin.stat().st_size,
        "idx_bytes": dataset.path_idx.stat().st_size,
        "checksums": dataset.has_checksums,
        "sequence_lengths": asdict(LengthFacts.of(dataset.lengths)),
        "document_lengths": asdict(LengthFacts.of(documents)),
        "sequences_per_document": asdict(LengthFacts.of(per_document)),
        "documents_of_one_sequence": int((per_document == 1).sum()),
    }
    if dataset.mask is not None:
        facts["counted"] = int(np.count_nonzero(dataset.mask))
    if wrote is not None:
        facts["wrote_sums"] = wrote
    if args.validate:
        dataset.validate(full=True)
        facts["valid"] = True
    if args.histogram:
        facts["histogram"] = histogram(documents)
    if args.unigram_entropy:
        facts["unigram_entropy"] = unigram_entropy(dataset)
    if args.pack is not None:
        facts["packing"] = packing_costs(dataset, args.pack)
    if args.document is not None:
        facts["document"] = _document(dataset, args)
    return facts


def _document(dataset: IndexedDataset, args: argparse.Namespace) -> dict[str, Any]:
    ids = [[int(i) for i in sequence] for sequence in dataset.document(args.document)]
    shown: dict[str, Any] = {"number": args.document, "ids": ids}
    if args.tokenizer_type is not None:
        from megazero.data.tokenizers.build import build_tokenizer

        tokenizer = build_tokenizer(cli.tokenizer_spec(args))
        shown["text"] = [tokenizer.decode(sequence) for sequence in ids]
    return shown


def print_facts(facts: dict[str, Any]) -> None:
    """Print the facts as lines for people."""
    from megazero.data_tools.dataset_facts import print_histogram

    print(facts["prefix"])
    for name in ("documents", "sequences", "tokens", "bin_bytes", "idx_bytes"):
        print(f"  {name:<17} {facts[name]:,}")
    print(f"  {'dtype':<17} {facts['dtype']}")
    if "counted" in facts:
        share = facts["counted"] / max(1, facts["tokens"])
        print(f"  {'counted':<17} {facts['counted']:,} ({share:.1%}), by the .mask")
    print(f"  {'checksums':<17} {'yes' if facts['checksums'] else 'no (.sum is missing)'}")
    if "wrote_sums" in facts:
        said = "written" if facts["wrote_sums"] else "not written: it is there and agrees with all tokens"
        print(f"  {'.sum':<17} {said}")
    for name in ("sequence_lengths", "document_lengths"):
        row = facts[name]
        middle = f"median {row['median']:,.1f}, mean {row['mean']:,.1f}"
        print(f"  {name:<17} min {row['min']:,}, {middle}, max {row['max']:,}")
    if facts["sequences"] != facts["documents"]:
        row = facts["sequences_per_document"]
        middle = f"median {row['median']:,.1f}, mean {row['mean']:,.1f}"
        alone = f"{facts['documents_of_one_sequence']:,} documents have one"
        print(f"  {'per document':<17} min {row['min']:,}, {middle}, max {row['max']:,} sequences; {alone}")
    if "valid" in facts:
        checked = (
            "index and tokens" if facts["checksums"] else "index only: there are no checksums for the tokens"
        )
        print(f"  {'valid':<17} yes ({checked})")
    if "unigram_entropy" in facts:
        print(f"  {'unigram_entropy':<17} {facts['unigram_entropy']:.4f} nats per token")
    if "packing" in facts:
        row = facts["packing"]
        share = row["padding"] / max(1, row["sequences"] * row["sequence_length"])
        print(
            f"  {'packed':<17} {row['sequences']:,} sequences of {row['sequence_length']:,} tokens, "
            f"{row['padding']:,} positions ({share:.2%}) of padding"
        )
        cut = f"{row['cut']:,} of {row['documents']:,}; {row['cut_end_to_end']:,} if laid end to end"
        print(f"  {'documents cut':<17} {cut}")
    if "histogram" in facts:
        print_histogram(facts["histogram"])
    if "document" in facts:
        shown = facts["document"]
        print(f"  document {shown['number']}: {len(shown['ids'])} sequences")
        for content in shown.get("text", shown["ids"]):
            print(content if isinstance(content, str) else " ".join(map(str, content)))


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the tool; returns 0 if the dataset is whole, else 1."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.split("\n")[0])
    parser.add_argument("prefix", metavar="PREFIX", help="path of the dataset without .bin or .idx")
    parser.add_argument("--document", type=int, metavar="K", help="print document K, counted from 0")
    parser.add_argument("--histogram", action="store_true", help="documents by length")
    parser.add_argument(
        "--unigram-entropy", action="store_true", help="entropy of the token frequencies in nats"
    )
    parser.add_argument(
        "--pack",
        type=cli.positive_int,
        metavar="N",
        help="what --pack best-fit costs with sequences of N tokens: padding and documents cut",
    )
    parser.add_argument("--validate", action="store_true", help="also compare every token with the checksums")
    parser.add_argument("--write-sums", action="store_true", help="write the checksums, if there are none")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    cli.add_tokenizer_flags(parser, required=False)
    args = parser.parse_args(argv)
    if args.document is not None and args.document < 0:
        parser.error(f"`--document` must be at least 0, but is {args.document}")
    return cli.run(inspect_dataset, args)
