"""Show documents of a dataset, or samples of a training, as text with their boundaries and loss masks.

`megazero data show PREFIX [--document N ... | --sample N ... --seq-length S]` prints ids without a tokenizer.
Tokens without loss are dim on a terminal with colors, and elsewhere stand between ⟦ and ⟧.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from megazero.data.build import DatasetRequest, DataSources, build_datasets
from megazero.data.from_config import GPTBuilder
from megazero.data.gpt_dataset import DocumentEnds, GPTDataset, GPTSettings
from megazero.data.indexed.reader import open_indexed
from megazero.data.tokenizers.base import Tokenizer
from megazero.data.tokenizers.build import build_tokenizer
from megazero.data_tools import cli
from megazero.data_tools.looking.outputs import count
from megazero.errors import DataError, printable


class _Passage(NamedTuple):
    """Tokens of one sequence; has_loss: bool [n]."""

    title: str
    ids: np.ndarray
    has_loss: np.ndarray


def _documents(prefix: str, numbers: Sequence[int] | None) -> Iterator[_Passage]:
    """The sequences of documents; by default of the first three."""
    dataset = open_indexed(prefix)
    mask = dataset.mask
    for number in range(min(3, dataset.document_index.size - 1)) if numbers is None else numbers:
        sequences = dataset.document(number) or [np.empty(0, dtype=dataset.dtype)]
        begin = dataset.tokens.size
        if (first := int(dataset.document_index[number])) < len(dataset):
            begin = int(dataset.offsets[first]) // dataset.dtype.itemsize
        for place, ids in enumerate(sequences, 1):
            loss = np.ones(ids.size, dtype=bool) if mask is None else mask[begin : begin + ids.size] > 0
            of = f", sequence {place:,} of {len(sequences):,}" if len(sequences) > 1 else ""
            yield _Passage(f"document {number:,}{of}", ids, loss)
            begin += ids.size


def _samples(args: argparse.Namespace, eod: int | None) -> Iterator[_Passage]:
    """The pieces of sequences in samples of a training on this dataset alone; the first token has no loss."""
    ends = DocumentEnds(eod, eod_mask_loss=args.eod_mask_loss)
    sources = DataSources(data_path=(args.prefix,), split=args.split)
    builder = GPTBuilder(GPTSettings(args.seq_length, args.seed, ends=ends))
    dataset = build_datasets(DatasetRequest(builder, (args.samples, 0, 0), sources))[0]
    if not isinstance(dataset, GPTDataset):
        raise DataError(f"the train split must have samples, but `--split` {args.split} gives it none.")
    index, lengths = dataset.index, dataset.indexed.lengths
    for number in args.sample:
        if number >= len(dataset):
            raise DataError(f"`--sample` must be in 0..{len(dataset) - 1} of {args.prefix}, but is {number}.")
        batch, row = dataset[number], int(index.shuffle_index[number])
        ids = np.append(batch["tokens"], batch["labels"][-1])
        loss = np.append(False, batch["loss_mask"] > 0)
        (first, offset), (last, _) = index.sample_index[row : row + 2].tolist()
        sequences = index.document_index[first : last + 1]
        borders = np.minimum(np.cumsum(lengths[sequences], dtype=np.int64) - offset, ids.size)
        for sequence, (low, high) in zip(sequences.tolist(), pairwise([0, *borders.tolist()]), strict=True):
            start = f" from token {offset:,}" if low == 0 and offset else ""
            if high > low:
                title = f"sample {number:,}, sequence {sequence:,}{start}"
                yield _Passage(title, ids[low:high], loss[low:high])


def _marked(ids: np.ndarray, loss: np.ndarray, tokenizer: Tokenizer | None, *, plain: bool) -> Text:
    """The ids as text, or as numbers without a tokenizer, in runs with loss and without."""
    text = Text()
    for low, high in pairwise([0, *(np.flatnonzero(np.diff(loss)) + 1).tolist(), ids.size]):
        numbers = ids[low:high].tolist()
        words = " ".join(map(str, numbers)) if tokenizer is None else tokenizer.decode(numbers)
        has_loss = low == high or bool(loss[low])
        words = printable(words, kept="\n\t")
        text.append(" " if tokenizer is None and low else "")
        text.append(f"⟦{words}⟧" if plain and not has_loss else words, "green" if has_loss else "dim")
    return text


def show(args: argparse.Namespace) -> None:
    """Print what the flags ask for. Raises DataError for what is not there."""
    tokenizer = build_tokenizer(cli.tokenizer_spec(args)) if args.tokenizer_type else None
    eod = None if tokenizer is None else tokenizer.eod
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    plain = not console.is_terminal or console.no_color
    passages = _documents(args.prefix, args.document) if args.sample is None else _samples(args, eod)
    for title, ids, loss in passages:
        about = f"--- {title}: {ids.size:,} tokens, {int(loss.sum()):,} with loss ---"
        console.print(Text(about, "bold cyan"))
        for form in dict.fromkeys((tokenizer, None) if args.ids else (tokenizer,)):
            console.print(_marked(ids[: args.limit], loss[: args.limit], form, plain=plain))
        if ids.size > args.limit:
            console.print(Text(f"... and {ids.size - args.limit:,} more tokens (`--limit N`)", "cyan"))


def _number(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, but is {text!r}")
    return int(text)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the tool; returns the exit status."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("prefix", metavar="PREFIX", help="path of the dataset without .bin or .idx")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--document", type=_number, nargs="+", metavar="N", help="these (the first three)")
    which.add_argument("--sample", type=_number, nargs="+", metavar="N", help="samples of a training on it")
    add("--seq-length", type=cli.positive_int, metavar="S", help="tokens of a sample")
    add("--samples", type=count, metavar="M", help="samples of the training, which order them (one epoch)")
    add("--split", default="969,30,1", help="train, validation and test proportions (969,30,1)")
    add("--seed", type=int, default=1234, help="of the training (1234)")
    add("--eod-mask-loss", action="store_true", help="no loss after the end of a document, in samples")
    add("--ids", action="store_true", help="the ids, too")
    add("--limit", type=cli.positive_int, default=2048, metavar="N", help="tokens shown of each piece (2048)")
    cli.add_tokenizer_flags(parser, required=False)
    args = parser.parse_args(argv)
    if (args.sample is None) != (args.seq_length is None):
        parser.error("`--sample` and `--seq-length` must be given together")
    return cli.run(show, args)
