"""Check that datasets are whole: the format, every checksum, ids and loss masks, on several threads.

`megazero data validate PREFIX... [--workers N] [--vocab-size N]` prints a line for each dataset and a sentence
for each damage, and ends with status 1 if there is any. Checksums are compared where there is a `.sum`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from megazero.data.indexed.checksum import BLOCK, Sidecar, TokenBlocks
from megazero.data.indexed.reader import IndexedDataset, content_hash, open_indexed
from megazero.data.tokenizers.build import build_tokenizer
from megazero.data_tools import cli
from megazero.data_tools.looking.mask import loss_mask
from megazero.errors import DataError

_SPAN = 16 * BLOCK  # bytes of the `.bin` that a worker checks at once
_MOST_SHOWN = 20


@dataclass(frozen=True)
class _Fault:
    """Something wrong: a sentence, and for ids and masks how many tokens it is said of."""

    sentence: str
    kind: str = ""
    count: int = 1


@dataclass
class _Verdict:
    """What was seen of one dataset; `dataset` is None if it cannot be opened."""

    prefix: str
    dataset: IndexedDataset | None = None
    blocks: TokenBlocks | None = None
    mask: np.ndarray | None = None
    faults: list[_Fault] = field(default_factory=list)
    same_as: str | None = None

    @staticmethod
    def of(prefix: str) -> _Verdict:
        """Open a dataset, which checks all but its tokens."""
        verdict = _Verdict(prefix)
        try:
            dataset = verdict.dataset = open_indexed(prefix)
            sidecar = Sidecar.load(dataset.path_sum)
            if sidecar is not None:
                content = dataset.tokens.view(np.uint8)
                offsets, documents = dataset.offsets, dataset.document_index
                verdict.blocks = TokenBlocks(sidecar, dataset.path_sum, content, offsets, documents)
            verdict.mask = loss_mask(dataset)
        except DataError as error:
            verdict.faults.append(_Fault(str(error)))
        return verdict

    def sentences(self) -> list[str]:
        """The faults, those of one kind as one."""
        said = {}
        for fault in self.faults:
            first, count = said.get(fault.kind or fault.sentence, (fault.sentence, 0))
            said[fault.kind or fault.sentence] = first, count + fault.count
        return [line if count == 1 else f"{line} {count - 1:,} more are like it." for line, count in said.values()]


def check(prefixes: Sequence[str], workers: int, vocabulary: int | None) -> list[_Verdict]:
    """Check the datasets, with progress on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    verdicts = [_Verdict.of(prefix) for prefix in prefixes]
    seen: dict[str, str] = {}
    for verdict in verdicts:
        if verdict.dataset is not None and verdict.dataset.total_tokens:
            first = seen.setdefault(content_hash(verdict.dataset), verdict.prefix)
            verdict.same_as = first if first != verdict.prefix else None
    spans = [
        (verdict, begin)
        for verdict in verdicts
        if verdict.dataset is not None
        for begin in range(0, verdict.dataset.tokens.nbytes, _SPAN)
    ]
    total = sum(verdict.dataset.tokens.nbytes for verdict in verdicts if verdict.dataset is not None)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr)
    with (
        Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bars,
        ThreadPoolExecutor(workers) as pool,
    ):
        task = bars.add_task("validate", total=total)
        checks = pool.map(lambda span: list(_faults(*span, vocabulary)), spans)
        for (verdict, _), faults in zip(spans, checks, strict=True):
            verdict.faults += faults
            bars.advance(task, _SPAN)
    return verdicts


def _faults(verdict: _Verdict, begin: int, vocabulary: int | None) -> Iterator[_Fault]:
    """What is wrong with a span of the tokens from byte `begin` on."""
    dataset, size = verdict.dataset, verdict.blocks
    assert dataset is not None
    width, end = dataset.dtype.itemsize, min(begin + _SPAN, dataset.tokens.nbytes)
    for at in range(begin, end, BLOCK):
        if size is not None:
            try:
                size.check(at // BLOCK)
            except DataError as error:
                yield _Fault(str(error))
        first = at // width
        ids = dataset.tokens[first : min(at + BLOCK, end) // width]
        limit = vocabulary or np.iinfo(dataset.dtype).max + 1
        if int(ids.min()) < 0 or int(ids.max()) >= limit:
            yield _outside(dataset, first, ids, limit)
        if verdict.mask is not None:
            values = verdict.mask[first : first + ids.size]
            if int(values.max()) > 1:
                wrong = np.flatnonzero(values > 1)
                yield _Fault(
                    f"`{dataset.prefix}.mask` must be 0 or 1 for each token, but is {int(values[wrong[0]])} for "
                    f"token {first + int(wrong[0]):,}; make the dataset again.",
                    "mask",
                    wrong.size,
                )


def _outside(dataset: IndexedDataset, first: int, ids: np.ndarray, limit: int) -> _Fault:
    wrong = np.flatnonzero((ids < 0) | (ids >= limit))
    place = first + int(wrong[0])
    sequence = int(np.searchsorted(dataset.offsets, place * dataset.dtype.itemsize, "right")) - 1
    document = int(np.searchsorted(dataset.document_index, sequence, "right")) - 1
    return _Fault(
        f"`token ids` of {dataset.path_bin} must be in 0..{limit - 1}, but token {place:,}, in document {document:,}, "
        f"is {int(ids[wrong[0]])}; use the tokenizer the dataset was made with.",
        "ids",
        wrong.size,
    )


def validate(args: argparse.Namespace) -> None:
    """Print what was checked of each dataset. Raises DataError if any is damaged."""
    vocabulary = args.vocab_size
    if args.tokenizer_type is not None:
        vocabulary = build_tokenizer(cli.tokenizer_spec(args)).vocab_size
    verdicts = check(args.prefix, args.workers, vocabulary)
    if args.json:
        print(json.dumps([_as_json(verdict) for verdict in verdicts]))
    else:
        for verdict in verdicts:
            print(_line(verdict, vocabulary))
            sentences = verdict.sentences()
            for sentence in sentences[:_MOST_SHOWN]:
                print(f"  {sentence}")
            if len(sentences) > _MOST_SHOWN:
                print(f"  and {len(sentences) - _MOST_SHOWN:,} more damaged blocks")
    damaged = [verdict.prefix for verdict in verdicts if verdict.faults]
    if damaged:
        raise DataError(
            f"`datasets` must be whole, but {len(damaged)} of {len(verdicts)} are not: {', '.join(damaged)}; make "
            "them again, or fetch them from where they are whole."
        )


def _line(verdict: _Verdict, vocabulary: int | None) -> str:
    dataset = verdict.dataset
    if dataset is None or verdict.faults:
        return f"damaged  {verdict.prefix}"
    facts = [f"{dataset.document_index.size - 1:,} documents", f"{dataset.total_tokens:,} tokens"]
    facts += ["every checksum right" if verdict.blocks else "no checksums (.sum is missing)"]
    facts += [f"ids below {vocabulary:,}"] if vocabulary else []
    facts += ["a loss mask"] if verdict.mask is not None else []
    facts += [f"the same as {verdict.same_as}"] if verdict.same_as else []
    return f"whole    {verdict.prefix}: {', '.join(facts)}"


def _as_json(verdict: _Verdict) -> dict[str, object]:
    return {
        "prefix": verdict.prefix,
        "valid": not verdict.faults,
        "faults": verdict.sentences(),
        "checksums": verdict.blocks is not None,
        "mask": verdict.mask is not None,
        "same_as": verdict.same_as,
    }


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the tool; returns 0 if all datasets are whole, else 1."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("prefix", nargs="+", metavar="PREFIX", help="path of a dataset without .bin or .idx")
    add("--workers", type=cli.positive_int, default=2, metavar="N", help="threads (2)")
    add("--json", action="store_true", help="a JSON list instead of lines")
    cli.add_tokenizer_flags(parser, required=False)
    args = parser.parse_args(argv)
    if args.vocab_size is not None and args.vocab_size < 1:
        parser.error(f"`--vocab-size` must be at least 1, but is {args.vocab_size}")
    return cli.run(validate, args)
