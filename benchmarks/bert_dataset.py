"""BERT's sample map and samples against megatron-core, on a synthetic corpus of sentences.

    python benchmarks/bert_dataset.py [--tokens N] [--sequence-length T ...] [--repeats R]

Prints one JSON line per measurement: `map_ms`, the time to build the sample map of one epoch, without reading
or writing a cache, and `samples_per_second`, random samples made one after another in batches of 16
(megatron-core has no batches: its samples are made one by one and not collated, which favours it). Both make
the same samples; they take turns within each round, and `ratio`, of the medians, is above 1 where megazero is
faster. Without megatron-core only our own figures are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.data.bert.dataset import BERTDataset, BERTSettings
from megazero.data.bert.sample_map import build_sample_map
from megazero.data.bert.word_pieces import WordPieces
from megazero.data.indexed.reader import open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data.native import NATIVE

BATCH = 16
SIZE = 30_522  # entries of BERT's uncased vocabulary
PIECES = 5_828  # of them begin with ##
FIRST_WORD = 1_000
SENTENCES = (1, 40)  # in a document
LENGTHS = (4, 50)  # tokens in a sentence


def vocabulary() -> WordPieces:
    """As large as BERT's uncased one, with the ids of its special tokens and as many ## pieces."""
    continues = np.zeros(SIZE, dtype=bool)
    continues[-PIECES:] = True
    return WordPieces(cls=101, sep=102, mask=103, pad=0, continues=continues, replacements=np.arange(SIZE))


def write_corpus(prefix: Path, tokens: int) -> None:
    """Documents of sentences, with random ids; the rate of pieces is about that of English."""
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        while tokens > 0:
            sizes = rng.integers(*LENGTHS, rng.integers(*SENTENCES))
            document = [rng.integers(FIRST_WORD, SIZE, size) for size in sizes]
            writer.add_document(document)
            tokens -= int(sizes.sum())


class Side(NamedTuple):
    """One of the two: builds the map and returns it; makes the samples of these numbers."""

    map: Callable[[], np.ndarray]
    read: Callable[[np.ndarray], None]


def core_side(prefix: Path, settings: BERTSettings) -> Side | None:
    """Megatron-core, or None if it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
            from megatron.core.datasets import bert_dataset as core
            from megatron.core.datasets import helpers
            from megatron.core.datasets.indexed_dataset import IndexedDataset as CoreIndexed
            from megatron.core.datasets.utils import Split
    except ImportError:
        return None
    torch.distributed.get_rank = lambda: 0  # it asks for a rank without looking whether there are any
    words, indexed = settings.words, CoreIndexed(str(prefix))
    length, short, seed = settings.sequence_length, settings.short_seq_prob, settings.seed
    config = core.BERTMaskedWordPieceDatasetConfig(
        random_seed=seed,
        sequence_length=length,
        tokenizer=SimpleNamespace(
            **{role: getattr(words, role) for role in ("cls", "sep", "mask", "pad")},
            inv_vocab={i: f"##{i}" if words.continues[i] else str(i) for i in range(words.size)},
            unique_identifiers={},
        ),
        path_to_cache=str(prefix.parent / f"core-{length}"),
        masking_probability=settings.mask_prob,
        short_sequence_probability=short,
        masking_max_ngram=3,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=settings.binary_head,
    )
    documents = np.arange(indexed.document_indices.size - 1, dtype=np.int32)
    # Asked for one sample, it gives an epoch, for it cuts none. It cannot be asked for an epoch itself.
    dataset = core.BERTMaskedWordPieceDataset(indexed, str(prefix), documents, 1, Split.train, config)
    shape = (1, 1, length - 3, short, seed, False, 2)  # epochs, samples, target, ..., verbose, sentences
    lengths, boundaries = indexed.sequence_lengths, indexed.document_indices

    def read(chosen: np.ndarray) -> None:
        for index in chosen.tolist():
            dataset[index]

    return Side(lambda: helpers.build_mapping(boundaries, lengths, *shape), read)


def our_side(prefix: Path, settings: BERTSettings) -> Side:
    indexed = open_indexed(prefix)
    dataset = BERTDataset(indexed, range(indexed.document_index.size - 1), None, settings)
    boundaries = np.array(indexed.document_index)

    def read(chosen: np.ndarray) -> None:
        for begin in range(0, chosen.size, BATCH):
            dataset.batch(chosen[begin : begin + BATCH])

    return Side(lambda: build_sample_map(indexed.lengths, boundaries, dataset.plan), read)


def milliseconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - begin)


def report(measure: str, rounds: list[list[float]], faster_is_less: bool, **more: object) -> None:
    """One line; each round has our figure and, if there is one, the other's."""
    mine = statistics.median(row[0] for row in rounds)
    line = {"benchmark": "bert_dataset", "measure": measure, "megazero": round(mine, 3)}
    if len(rounds[0]) > 1:
        other = statistics.median(row[1] for row in rounds)
        ratio = other / mine if faster_is_less else mine / other
        line |= {"megatron_core": round(other, 3), "ratio": round(ratio, 2)}
    print(json.dumps({**line, "compiled": NATIVE is not None, **more}), flush=True)


def measure(prefix: Path, length: int, args: argparse.Namespace) -> None:
    """Both measurements, the two sides taking turns after one round that is not measured."""
    settings = BERTSettings(sequence_length=length, words=vocabulary())
    sides = [side for side in (our_side(prefix, settings), core_side(prefix, settings)) if side is not None]
    shape = {"tokens": args.tokens, "sequence_length": length, "repeats": args.repeats}
    maps = [side.map() for side in sides]
    if not all(np.array_equal(maps[0], other) for other in maps):
        raise SystemExit("the two sample maps differ")
    times = [[milliseconds(side.map) for side in sides] for _ in range(10 * args.repeats)]  # they are short
    report("map_ms", times, True, rows=len(maps[0]), **shape)

    rng = np.random.default_rng(1)
    rates = []
    for _ in range(args.repeats + 1):
        chosen = rng.integers(0, len(maps[0]), args.samples)
        rates.append(
            [1e3 * args.samples / milliseconds(lambda s=side, c=chosen: s.read(c)) for side in sides]
        )
    report("samples_per_second", rates[1:], False, samples=args.samples, **shape)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=5_000_000)
    parser.add_argument("--sequence-length", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1024, help="random samples made per round")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        prefix = Path(directory) / "corpus"
        write_corpus(prefix, args.tokens)
        for length in args.sequence_length:
            measure(prefix, length, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
