"""Show what datasets hold: documents, lengths, bytes per token, duplicates, and ids that never occur.

`megazero data stats PREFIX...` reads all tokens once, in bounded memory; `--fast` reads the indexes alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megazero.data.indexed.reader import IndexedDataset, open_indexed
from megazero.data.tokenizers.base import Tokenizer
from megazero.data.tokenizers.build import build_tokenizer
from megazero.data_tools import cli
from megazero.data_tools.dataset_facts import document_lengths, histogram, print_histogram, token_counts
from megazero.data_tools.looking.duplicates import count_duplicates
from megazero.data_tools.looking.outputs import add_picture_flags, print_columns

_QUANTILES = (0, 5, 25, 50, 75, 95, 99, 100)
_MOST_DECODED = 1 << 20  # tokens of the sample that is decoded


@dataclass(frozen=True)
class _Vocabulary:
    """What is known of the ids: the tokenizer, and how many ids there are; None if it is not."""

    tokenizer: Tokenizer | None
    size: int | None

    @staticmethod
    def of(args: argparse.Namespace) -> _Vocabulary:
        if args.tokenizer_type is None:
            return _Vocabulary(None, args.vocab_size)
        tokenizer = build_tokenizer(cli.tokenizer_spec(args))
        return _Vocabulary(tokenizer, tokenizer.vocab_size)


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """Collect the facts as a JSON object: of each source, and of all of them."""
    vocabulary = _Vocabulary.of(args)
    datasets = [open_indexed(prefix) for prefix in args.prefix]
    lengths = [document_lengths(dataset) for dataset in datasets]
    everything = np.concatenate(lengths)
    total = sum(dataset.total_tokens for dataset in datasets)
    facts: dict[str, Any] = {
        "sources": [
            {
                "prefix": dataset.prefix,
                "documents": sizes.size,
                "sequences": len(dataset),
                "tokens": dataset.total_tokens,
                "share": dataset.total_tokens / max(1, total),
                "lengths": _quantiles(sizes),
                "histogram": histogram(sizes),
            }
            for dataset, sizes in zip(datasets, lengths, strict=True)
        ],
        "documents": everything.size,
        "sequences": sum(map(len, datasets)),
        "tokens": total,
        "lengths": _quantiles(everything),
        "histogram": histogram(everything),
    }
    if not args.fast:
        _read_tokens(facts, datasets, vocabulary)
    if vocabulary.tokenizer is not None:
        for row, dataset in zip(facts["sources"], datasets, strict=True):
            row["bytes_per_token"] = _bytes_per_token(dataset, vocabulary.tokenizer, args)
    return facts


def _quantiles(lengths: np.ndarray) -> dict[str, float]:
    """Mean, and the length that a percentage of the documents does not exceed; empty without documents."""
    if not lengths.size:
        return {}
    values = np.percentile(lengths, _QUANTILES, method="inverted_cdf").tolist()
    return {"mean": float(lengths.mean()), **{f"p{q}": int(v) for q, v in zip(_QUANTILES, values, strict=True)}}


def _read_tokens(facts: dict[str, Any], datasets: list[IndexedDataset], vocabulary: _Vocabulary) -> None:
    counts, lasts = np.zeros(vocabulary.size or 0, dtype=np.int64), []
    for row, dataset in zip(facts["sources"], datasets, strict=True):
        own = token_counts(dataset)
        row["ids_used"] = int((own > 0).sum())
        wider = np.zeros(max(own.size, counts.size), dtype=np.int64)
        wider[: counts.size] = counts
        wider[: own.size] += own
        counts = wider
        ends = np.append(dataset.offsets // dataset.dtype.itemsize, dataset.total_tokens)[dataset.document_index]
        lasts.append(dataset.tokens[ends[1:][np.diff(ends) > 0] - 1])
    size = counts.size if vocabulary.size is None else vocabulary.size
    unused = np.flatnonzero(counts[:size] == 0)
    facts["ids"] = {
        "vocabulary": vocabulary.size,
        "used": int((counts > 0).sum()),
        "largest": counts.size - 1 if counts.any() else None,
        "never_used": unused.size,
        "first_never_used": unused[:20].tolist(),
        "tokens_outside": int(counts[size:].sum()),
    }
    eod = None if vocabulary.tokenizer is None else vocabulary.tokenizer.eod
    ends_with = np.bincount(np.concatenate(lasts)) if facts["tokens"] else np.zeros(0, dtype=np.int64)
    if eod is None and ends_with.size:
        eod = int(ends_with.argmax())
    if eod is not None:
        documents = int(ends_with[eod]) if eod < ends_with.size else 0
        facts["end_of_document"] = {
            "id": eod,
            "share_of_tokens": (int(counts[eod]) if eod < counts.size else 0) / max(1, facts["tokens"]),
            "share_of_documents": documents / max(1, int(ends_with.sum())),
        }
    twins = count_duplicates(datasets)
    for row, number in zip(facts["sources"], twins.by_source, strict=True):
        row["duplicates"] = number
    facts["duplicates"] = {
        "documents": sum(twins.by_source),
        "tokens": twins.tokens,
        "texts": twins.groups,
        "largest": twins.largest,
        "example": twins.example and [datasets[twins.example[0]].prefix, twins.example[1]],
    }


def _bytes_per_token(dataset: IndexedDataset, tokenizer: Tokenizer, args: argparse.Namespace) -> dict[str, Any]:
    """UTF-8 bytes by tokens of a random sample of documents, without the token that ends a document."""
    random, count = np.random.default_rng(args.seed), dataset.document_index.size - 1
    documents = tokens = written = 0
    for number in random.choice(count, min(count, args.sample_documents), replace=False).tolist():
        ids = np.concatenate([*dataset.document(number), []]).astype(np.int64)
        ids = ids[: _MOST_DECODED - tokens]
        ids = ids[ids != tokenizer.eod] if tokenizer.eod is not None else ids
        documents, tokens = documents + 1, tokens + ids.size
        written += len(tokenizer.decode(ids.tolist()).encode("utf-8", "replace"))
        if tokens >= _MOST_DECODED:
            break
    return {"bytes": written / tokens if tokens else None, "sampled_documents": documents, "sampled_tokens": tokens}


def print_stats(facts: dict[str, Any]) -> None:
    """Print the facts for people."""
    names = ["source", "documents", "sequences", "tokens", "share", "median", "p95", "longest"]
    names += ["bytes/token"] * ("bytes_per_token" in facts["sources"][0])
    names += ["ids used", "duplicates"] * ("ids" in facts)
    print_columns([names, *(_cells(row) for row in facts["sources"])])
    if len(facts["sources"]) > 1:
        print(f"\n{facts['documents']:,} documents, {facts['tokens']:,} tokens")
    print()
    if facts["lengths"]:
        mean, *rest = facts["lengths"].items()
        print("document lengths  " + ", ".join(f"{k} {v:,}" for k, v in rest) + f"; mean {mean[1]:,.1f}")
    if "ids" in facts:
        _print_tokens(facts)
    if "bytes_per_token" in facts["sources"][0]:
        sampled = sum(row["bytes_per_token"]["sampled_documents"] for row in facts["sources"])
        print(f"bytes per token   decoded from {sampled:,} random documents")
    print_histogram(facts["histogram"])


def _cells(row: dict[str, Any]) -> list[str]:
    lengths = (f"{row['lengths'][q]:,}" if row["lengths"] else "-" for q in ("p50", "p95", "p100"))
    cells = [row["prefix"], *(f"{row[name]:,}" for name in ("documents", "sequences", "tokens"))]
    cells += [f"{row['share']:.2%}", *lengths]
    if "bytes_per_token" in row:
        value = row["bytes_per_token"]["bytes"]
        cells.append("-" if value is None else f"{value:.3f}")
    if "duplicates" in row:
        cells += [f"{row['ids_used']:,}", f"{row['duplicates']:,} ({row['duplicates'] / max(1, row['documents']):.2%})"]
    return cells


def _print_tokens(facts: dict[str, Any]) -> None:
    ids, twins = facts["ids"], facts["duplicates"]
    of = "" if ids["vocabulary"] is None else f" of {ids['vocabulary']:,}"
    some = ", ".join(map(str, ids["first_never_used"]))
    more = ", ..." if ids["never_used"] > len(ids["first_never_used"]) else ""
    below = f" below the largest, {ids['largest']:,}" if ids["vocabulary"] is None and ids["used"] else ""
    never = f"; {ids['never_used']:,} never occur{below} ({some}{more})" if some else ""
    print(f"ids               {ids['used']:,}{of} occur{never}")
    if ids["tokens_outside"]:
        print(f"                  {ids['tokens_outside']:,} tokens lie outside the vocabulary")
    if "end_of_document" in facts:
        end = facts["end_of_document"]
        print(
            f"end of document   id {end['id']} ends {end['share_of_documents']:.2%} of the documents, and is "
            f"{end['share_of_tokens']:.2%} of the tokens"
        )
    line = "no document has exactly the tokens of another"
    if twins["documents"]:
        prefix, number = twins["example"]
        line = (
            f"{twins['documents']:,} documents ({twins['documents'] / facts['documents']:.2%}) with "
            f"{twins['tokens']:,} tokens equal an earlier one; the most frequent of {twins['texts']:,} texts is "
            f"there {twins['largest']:,} times, first as document {number:,} of {prefix}"
        )
    print(f"duplicates        {line}")


def stats(args: argparse.Namespace) -> None:
    """Print the facts, and draw them if asked to. Raises DataError for a damaged dataset."""
    facts = collect(args)
    if args.json:
        print(json.dumps(facts))
    else:
        print_stats(facts)
    if args.picture is not None:
        from megazero.data_tools.looking.pictures import draw_stats

        draw_stats(facts, args.picture, args.theme)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the tool; returns the exit status."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("prefix", nargs="+", metavar="PREFIX", help="path of a dataset without .bin or .idx")
    add("--fast", action="store_true", help="read the indexes alone: lengths and shares")
    text = "documents that are decoded for the bytes per token (256)"
    add("--sample-documents", type=cli.positive_int, default=256, metavar="N", help=text)
    add("--seed", type=int, default=1234, help="of the sample (1234)")
    add("--json", action="store_true", help="one JSON object instead of a table")
    add_picture_flags(parser)
    cli.add_tokenizer_flags(parser, required=False)
    return cli.run(stats, parser.parse_args(argv))
