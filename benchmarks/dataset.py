"""Index building and sample reading against megatron-core, on a synthetic corpus of 10^8 tokens.

    python benchmarks/dataset.py [--tokens N] [--documents N] [--sequence-length T] [--repeats R]

Prints one JSON line per measurement: `index_ms`, the time to build document, sample and shuffle index of one
epoch, and `samples_per_second`, random samples read one after another in batches of 16 (megatron-core has no
batches: its samples are read one by one and not collated, which favours it). Both take turns within one
process and the medians are compared; `ratio` above 1 means megazero is faster. Without megatron-core only our
own figures are printed.
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

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.data.gpt_dataset import GPTDataset, GPTSettings
from megazero.data.indexed.reader import IndexedDataset, open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data.native import NATIVE

BATCH = 16
SEED = 1234


def write_corpus(prefix: Path, tokens: int, documents: int) -> None:
    """Write documents of random lengths around the mean, with random ids below 50,257."""
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.integers(0, tokens + 1, documents - 1))
    lengths = np.diff(np.concatenate(([0], cuts, [tokens])))
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for part in np.array_split(lengths, 10):
            writer.add_raw(rng.integers(0, 50257, int(part.sum()), dtype=np.uint16), part)


def core_builder(prefix: Path, length: int) -> Callable[[], object] | None:
    """A function that builds megatron-core's GPTDataset without a cache, or None if it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.datasets import gpt_dataset as core
            from megatron.core.datasets.indexed_dataset import IndexedDataset as CoreIndexed
            from megatron.core.datasets.utils import Split
    except ImportError:
        return None
    # An object standing for the tokenizer; `mock` keeps the index in memory, as ours is here.
    tokenizer = SimpleNamespace(vocab_size=50257, eod=50256, pad=-7, unique_identifiers={})
    config = core.GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=length,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    indexed = CoreIndexed(str(prefix))
    ids = np.arange(len(indexed), dtype=np.int32)
    return lambda: core.GPTDataset(indexed, str(prefix), ids, None, Split.train, config)


def our_builder(indexed: IndexedDataset, length: int) -> Callable[[], GPTDataset]:
    settings = GPTSettings(sequence_length=length, seed=SEED, vocab_size=50257)
    return lambda: GPTDataset(indexed, range(len(indexed)), None, settings)


def milliseconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - begin)


def report(
    measure: str, ours: list[float], theirs: list[float], faster_is_less: bool, **more: object
) -> None:
    mine = statistics.median(ours)
    line = {"benchmark": "dataset", "measure": measure, "megazero": round(mine, 3)}
    if theirs:
        other = statistics.median(theirs)
        ratio = other / mine if faster_is_less else mine / other
        line |= {"megatron_core": round(other, 3), "ratio": round(ratio, 2)}
    print(json.dumps({**line, "compiled": NATIVE is not None, **more}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--samples", type=int, default=4096, help="random samples read per repeat")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        prefix = Path(directory) / "corpus"
        write_corpus(prefix, args.tokens, args.documents)
        measure(prefix, args)
    return 0


def measure(prefix: Path, args: argparse.Namespace) -> None:
    """Both measurements, the two sides taking turns after one unmeasured round."""
    build_ours = our_builder(open_indexed(prefix), args.sequence_length)
    build_core = core_builder(prefix, args.sequence_length)
    sides = [build_ours] if build_core is None else [build_ours, build_core]
    shape = {key: getattr(args, key) for key in ("tokens", "documents", "sequence_length", "repeats")}
    datasets = [build() for build in sides]
    times = [[milliseconds(build) for build in sides] for _ in range(args.repeats)]
    report("index_ms", [t[0] for t in times], [t[1] for t in times if len(t) > 1], True, **shape)

    rng = np.random.default_rng(1)
    rates: list[list[float]] = []
    for _ in range(args.repeats + 1):
        chosen = rng.integers(0, len(datasets[0]), args.samples)
        ours = milliseconds(lambda c=chosen: read_batches(datasets[0], c))
        rates.append([1e3 * args.samples / ours])
        if build_core is not None:
            theirs = milliseconds(lambda c=chosen: read_singly(datasets[1], c))
            rates[-1].append(1e3 * args.samples / theirs)
    rates = rates[1:]
    report("samples_per_second", [r[0] for r in rates], [r[1] for r in rates if len(r) > 1], False, **shape)


def read_batches(dataset: GPTDataset, chosen: np.ndarray) -> None:
    for begin in range(0, chosen.size, BATCH):
        dataset.batch(chosen[begin : begin + BATCH])


def read_singly(dataset: object, chosen: np.ndarray) -> None:
    for index in chosen.tolist():
        dataset[index]


if __name__ == "__main__":
    sys.exit(main())
