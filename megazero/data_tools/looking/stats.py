"""Show what datasets hold: documents, lengths, bytes per token, duplicates, and ids that never occur.

`megazero data stats PREFIX...` reads all tokens, in bounded memory; `--fast` reads the indexes alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from megazero.data.indexed.reader import IndexedDataset, open_indexed
from megazero.data.tokenizers.base import Tokenizer
from megazero.data.tokenizers.build import build_tokenizer
from megazero.data_tools import cli
from megazero.data_tools.dataset_facts import document_lengths, histogram, print_histogram, token_counts
from megazero.data_tools.looking.duplicates import count_duplicates
from megazero.data_tools.looking.outputs import add_output_flags, present, print_columns
from megazero.data_tools.looking.pictures import stats_figure

_QUANTILES = (0, 5, 25, 50, 75, 95, 99, 100)
_MOST_DECODED = 1 << 20  # tokens of a source's sample


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """Collect the facts of all sources, and of each, as a JSON object."""
    tokenizer = build_tokenizer(cli.tokenizer_spec(args)) if args.tokenizer_type else None
    datasets = [open_indexed(prefix) for prefix in args.prefix]
    lengths = [document_lengths(dataset) for dataset in datasets]
    facts = _lengths(np.concatenate(lengths), sum(map(len, datasets)))
    facts["sources"] = rows = []
    for dataset, sizes in zip(datasets, lengths, strict=True):
        row = {"prefix": dataset.prefix, **_lengths(sizes, len(dataset))}
        row["share"] = row["tokens"] / max(1, facts["tokens"])
        if tokenizer is not None:
            row["bytes_per_token"] = _bytes_per_token(dataset, tokenizer, args)
        rows.append(row)
    if not args.fast:
        size, eod = (args.vocab_size, None) if tokenizer is None else (tokenizer.vocab_size, tokenizer.eod)
        facts |= _tokens(datasets, rows, size, eod)
        facts["duplicates"] = count_duplicates(datasets)
    return facts


def _lengths(sizes: np.ndarray, sequences: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"documents": sizes.size, "sequences": sequences, "tokens": int(sizes.sum())}
    if sizes.size:  # the length that a percentage of the documents does not exceed
        values = np.percentile(sizes, _QUANTILES, method="inverted_cdf").tolist()
        facts["mean_length"] = float(sizes.mean())
        facts["lengths"] = {f"p{q}": int(value) for q, value in zip(_QUANTILES, values, strict=True)}
    return {**facts, "histogram": histogram(sizes)}


def _bytes_per_token(
    dataset: IndexedDataset, tokenizer: Tokenizer, args: argparse.Namespace
) -> dict[str, float | None]:
    """UTF-8 bytes by tokens of random documents, without the token that ends a document."""
    random, there = np.random.default_rng(args.seed), dataset.document_index.size - 1
    documents = tokens = size = 0
    for number in random.choice(there, min(there, args.sample_documents), replace=False).tolist():
        text = [part[:_MOST_DECODED].tolist() for part in dataset.document(number)]
        ids = [token for part in text for token in part if token != tokenizer.eod]
        documents, tokens = documents + 1, tokens + len(ids)
        size += len(tokenizer.decode(ids).encode("utf-8", "replace"))
        if tokens >= _MOST_DECODED:
            break
    return {"mean": size / tokens if tokens else None, "documents": documents, "tokens": tokens}


def _tokens(
    datasets: Sequence[IndexedDataset], rows: Sequence[dict[str, Any]], size: int | None, eod: int | None
) -> dict[str, Any]:
    """Describe the tokens. eod: the id that ends documents; by default the one that most of them end with."""
    counts, ends = np.zeros((2, 0), dtype=np.int64)
    for dataset, row in zip(datasets, rows, strict=True):
        own = token_counts(dataset)
        row["ids_used"] = int((own > 0).sum())
        borders = np.append(dataset.offsets // dataset.dtype.itemsize, dataset.total_tokens)
        borders = borders[dataset.document_index]
        last = np.bincount(dataset.tokens[borders[1:][np.diff(borders) > 0] - 1], minlength=own.size)
        counts, ends = _sum(counts, own), _sum(ends, last)
    if eod is None and ends.size:
        eod = int(ends.argmax())
    counts = _sum(counts, np.zeros(max(size or 0, (eod or 0) + 1), dtype=np.int64))
    unused = np.flatnonzero(counts[:size] == 0)
    outside = int(counts[size or counts.size :].sum())
    ids = {"vocabulary": size, "used": int((counts > 0).sum()), "tokens_outside": outside}
    ids |= {"never_used": unused.size, "first_never_used": unused[:20].tolist()}
    end: dict[str, float | None] = {"id": eod}
    if eod is not None:
        ends = _sum(ends, np.zeros(counts.size, dtype=np.int64))
        end["share_of_tokens"] = float(counts[eod] / max(1, counts.sum()))
        end["share_of_documents"] = float(ends[eod] / max(1, ends.sum()))
    return {"ids": ids, "end_of_document": end}


def _sum(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The sum of two counts by id, of which one may be shorter."""
    total = np.zeros(max(one.size, other.size), dtype=np.int64)
    total[: one.size] += one
    total[: other.size] += other
    return total


def print_stats(facts: dict[str, Any]) -> None:
    """Print the facts for people."""
    rows, read = facts["sources"], "ids" in facts
    names = ["source", "documents", "sequences", "tokens", "share", "median", "p95", "longest"]
    names += ["bytes/token"] * ("bytes_per_token" in rows[0]) + ["ids used", "duplicates"] * read
    table = [names]
    for number, row in enumerate(rows):
        lengths = row.get("lengths", {})
        cells = [row["prefix"], *(f"{row[name]:,}" for name in ("documents", "sequences", "tokens"))]
        cells += [f"{row['share']:.2%}", *(f"{lengths.get(q, 0):,}" for q in ("p50", "p95", "p100"))]
        if "bytes_per_token" in row:
            cells.append(f"{row['bytes_per_token']['mean'] or 0:.3f}")
        if read:
            copies = facts["duplicates"]["documents"][number]
            cells += [f"{row['ids_used']:,}", f"{copies:,} ({copies / max(1, row['documents']):.2%})"]
        table.append(cells)
    print_columns(table)
    print(f"\n{facts['documents']:,} documents, {facts['tokens']:,} tokens")
    if "lengths" in facts:
        lengths = ", ".join(f"{name} {value:,}" for name, value in facts["lengths"].items())
        print(f"lengths: {lengths}; mean {facts['mean_length']:,.1f}")
    if "bytes_per_token" in rows[0]:
        sampled = sum(row["bytes_per_token"]["documents"] for row in rows)
        print(f"bytes per token: decoded from {sampled:,} random documents, without the ends of documents")
    if read:
        _print_tokens(facts["ids"], facts["end_of_document"], facts["duplicates"])
    print_histogram(facts["histogram"])


def _print_tokens(ids: dict[str, Any], end: dict[str, Any], twins: dict[str, Any]) -> None:
    of = "" if ids["vocabulary"] is None else f" of {ids['vocabulary']:,}"
    some = ", ".join(map(str, ids["first_never_used"])) + ", ..." * (ids["never_used"] > 20)
    never = f"; {ids['never_used']:,} never do ({some})" if ids["never_used"] else ""
    print(f"ids: {ids['used']:,}{of} occur{never}")
    if ids["tokens_outside"]:
        print(f"{ids['tokens_outside']:,} tokens are outside the vocabulary")
    if end["id"] is not None:
        documents, tokens = f"{end['share_of_documents']:.2%}", f"{end['share_of_tokens']:.2%}"
        print(f"end of document: id {end['id']} ends {documents} of documents, and is {tokens} of tokens")
    if twins["example"]:
        prefix, number = twins["example"]
        equal = f"{sum(twins['documents']):,} documents with {twins['tokens']:,} tokens equal an earlier one"
        most = f"{twins['largest']:,} times, first as document {number:,} of {prefix}"
        print(f"duplicates: {equal}; of {twins['texts']:,} such texts, the most frequent is there {most}")


def stats(args: argparse.Namespace) -> None:
    """Print the facts, and draw them if asked to. Raises DataError for a damaged dataset."""
    present(collect(args), args, print_stats, stats_figure)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the tool; returns the exit status."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("prefix", nargs="+", metavar="PREFIX", help="path of a dataset without .bin or .idx")
    add("--fast", action="store_true", help="read the indexes alone: lengths and shares")
    text = "documents that are decoded for the bytes per token (256)"
    add("--sample-documents", type=cli.positive_int, default=256, metavar="N", help=text)
    add("--seed", type=int, default=1234, help="of this sample (1234)")
    add_output_flags(parser)
    cli.add_tokenizer_flags(parser, required=False)
    return cli.run(stats, parser.parse_args(argv))
