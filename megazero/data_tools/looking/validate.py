"""Check that datasets are whole: the format, every checksum, ids and loss masks, on several threads.

`megazero data validate PREFIX... [--workers N] [--vocab-size N]` prints a line for each dataset and a
sentence for each damage, and ends with status 1 if there is any. Where there is no `.sum`, it says so.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from megazero.data.indexed.checksum import BLOCK
from megazero.data.indexed.reader import IndexedDataset, content_hash, open_indexed
from megazero.data.tokenizers.build import build_tokenizer
from megazero.data_tools import cli
from megazero.errors import DataError

_SPAN = 16 * BLOCK  # bytes of the `.bin` that a thread checks at once
_MOST_SHOWN = 20


def _faults(dataset: IndexedDataset, begin: int, limit: int | None) -> Iterator[str]:
    """Yield the faults in a span of the tokens, from byte `begin` on; ids must be below `limit`."""
    mask, width = dataset.mask, dataset.dtype.itemsize
    largest = (limit or np.iinfo(dataset.dtype).max + 1) - 1
    for at in range(begin, min(begin + _SPAN, dataset.tokens.nbytes), BLOCK):
        place, ids = at // width, dataset.tokens[at // width : (at + BLOCK) // width]
        for blocks in dataset.blocks:
            try:
                if at % (BLOCK * blocks.scale) == 0:
                    blocks.check(at // (BLOCK * blocks.scale))
            except DataError as error:
                yield str(error)
        if (ids.dtype.kind == "i" and int(ids.min()) < 0) or (limit is not None and int(ids.max()) > largest):
            wrong = np.flatnonzero((ids < 0) | (ids > largest))
            yield (
                f"`token ids` of {dataset.path_bin} must be in 0..{largest}, but token "
                f"{place + int(wrong[0]):,} is {int(ids[wrong[0]])}, and {wrong.size - 1:,} of the next "
                f"{ids.size:,} are others; use the tokenizer the dataset was made with."
            )
        if mask is not None and int(mask[place : place + ids.size].max()) > 1:
            place += int((mask[place : place + ids.size] > 1).argmax())
            yield (
                f"`{dataset.prefix}.mask` must be 0 or 1 for each token, but is {mask[place]} for token "
                f"{place:,}; make the dataset again."
            )


def check(opened: Mapping[str, IndexedDataset], workers: int, limit: int | None) -> dict[str, list[str]]:
    """The faults in the tokens of each dataset, with progress on a terminal."""
    from rich.console import Console
    from rich.progress import track

    faults: dict[str, list[str]] = {prefix: [] for prefix in opened}
    spans = [(p, at) for p, one in opened.items() for at in range(0, one.tokens.nbytes, _SPAN)]
    with ThreadPoolExecutor(workers) as pool:
        results = pool.map(lambda span: list(_faults(opened[span[0]], span[1], limit)), spans)
        console, silent = Console(file=sys.stderr), not sys.stderr.isatty()
        done = track(results, "checking", len(spans), console=console, transient=True, disable=silent)
        for (prefix, _), sentences in zip(spans, done, strict=True):
            faults[prefix] += sentences
    return faults


def _facts(opened: Mapping[str, IndexedDataset], limit: int | None) -> Iterator[tuple[str, str]]:
    """Say what was checked of each dataset, and which earlier one it is a copy of."""
    sizes = Counter((len(one), one.tokens.nbytes) for one in opened.values())
    firsts: dict[str, str] = {}
    for prefix, dataset in opened.items():
        facts = [f"{dataset.document_index.size - 1:,} documents", f"{dataset.total_tokens:,} tokens"]
        facts.append("every checksum right" if dataset.blocks else "no checksums (.sum is missing)")
        facts += [] if limit is None else [f"ids below {limit:,}"]
        facts += [] if dataset.mask is None else ["a loss mask"]
        if sizes[len(dataset), dataset.tokens.nbytes] > 1:
            first = firsts.setdefault(content_hash(dataset), prefix)
            facts += [] if first == prefix else [f"the same as {first}"]
        yield prefix, ", ".join(facts)


def validate(args: argparse.Namespace) -> None:
    """Print what was checked of each dataset. Raises DataError if any is damaged."""
    limit = args.vocab_size
    if args.tokenizer_type is not None:
        limit = build_tokenizer(cli.tokenizer_spec(args)).vocab_size
    faults: dict[str, list[str]] = {}
    opened = {}
    for prefix in dict.fromkeys(args.prefix):
        try:
            opened[prefix] = open_indexed(prefix)
        except DataError as error:
            faults[prefix] = [str(error)]
    faults |= check(opened, args.workers, limit)
    facts = dict(_facts(opened, limit))
    for prefix in dict.fromkeys(args.prefix):
        sentences = faults[prefix]
        print(f"damaged  {prefix}" if sentences else f"whole    {prefix}: {facts[prefix]}")
        for sentence in sentences[:_MOST_SHOWN]:
            print(f"  {sentence}")
        if len(sentences) > _MOST_SHOWN:
            print(f"  and {len(sentences) - _MOST_SHOWN:,} more faults")
    damaged = [prefix for prefix, sentences in faults.items() if sentences]
    if damaged:
        raise DataError(
            f"`datasets` must be whole, but {len(damaged)} of {len(faults)} are not: {', '.join(damaged)}; "
            "make them again, or fetch them from where they are whole."
        )


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the tool; returns 0 if all datasets are whole, else 1."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("prefix", nargs="+", metavar="PREFIX", help="path of a dataset without .bin or .idx")
    add("--workers", type=cli.positive_int, default=2, metavar="N", help="threads (2)")
    cli.add_tokenizer_flags(parser, required=False)
    return cli.run(validate, parser.parse_args(argv))
