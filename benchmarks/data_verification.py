"""What it costs to compare each block of a dataset with its checksum when it is first used.

    python benchmarks/data_verification.py [--data-path PREFIX] [--step-seconds S] [--rounds R]

Without a dataset it makes one of at least 250 MB with data_tools: the standard library's sources as bytes,
several times over. It is read as the GPT of the README's quickstart reads it: 8 samples of 256 tokens at a
time, in the order of a training. Guarded and unguarded batches take turns, each round on datasets that
are opened anew, so a first use is a first use again; the files are in the page cache. Times are those of the
processor, which others do not lengthen. The share of a step is that of a training which waits for all
its reading, though a real one reads ahead in a thread. JSON lines, medians over the rounds:

- `crc`: the rate of the checksum alone.
- `first_pass`: time of a sample until all blocks have been used, and the share of a step while that lasts.
- `afterwards`: the same when all blocks are known to be sound.
- `new_block_each`: every sample in a block that was not used before, the worst there is.
- `looks`: one look whether the files changed, as every `--log-interval` steps and before each save.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.data.gpt_dataset import GPTDataset, GPTSettings
from megazero.data.indexed.checksum import BLOCK
from megazero.data.indexed.reader import open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data.sources import changed_files
from megazero.data_tools import preprocess_data
from megazero.data_tools.corpora import sources as make_corpus

MICRO_BATCH = 8


def make_dataset(folder: Path, size: int) -> str:
    """A dataset of at least `size` bytes; returns its prefix."""
    corpus, part, whole = folder / "corpus.jsonl", folder / "part", folder / "whole"
    run(make_corpus, "--output", corpus)
    tokenizer = ("--tokenizer-type", "ByteLevelTokenizer", "--append-eod")
    run(preprocess_data, "--input", corpus, "--output-prefix", part, *tokenizer)
    prefix = f"{part}_text_document"
    copies = -(-size // Path(f"{prefix}.bin").stat().st_size)
    with IndexedDatasetWriter(whole, open_indexed(prefix).dtype) as writer:
        for _ in range(copies):
            writer.append_dataset(prefix)
    return str(whole)


def run(tool, *arguments: object) -> None:
    if tool.main([str(argument) for argument in arguments]):
        raise SystemExit(f"{tool.__name__} failed")


def opened(prefix: str, length: int, guarded: bool) -> GPTDataset:
    indexed = open_indexed(prefix, guarded=guarded)
    return GPTDataset(indexed, range(len(indexed)), None, GPTSettings(length, vocab_size=1 << 16))


def seconds(dataset: GPTDataset, numbers: np.ndarray) -> float:
    begin = time.thread_time()
    dataset.batch(numbers)
    return time.thread_time() - begin


def in_turn(pair: tuple[GPTDataset, GPTDataset], batches: list[np.ndarray]) -> tuple[float, float]:
    """Seconds of all batches from each of the two, one batch of each at a time, the first alternating."""
    totals = [0.0, 0.0]
    for number, batch in enumerate(batches):
        for which in (0, 1) if number % 2 else (1, 0):
            totals[which] += seconds(pair[which], batch)
    return totals[0], totals[1]


def split(order: np.ndarray) -> list[np.ndarray]:
    return [
        order[at : at + MICRO_BATCH] for at in range(0, len(order) // MICRO_BATCH * MICRO_BATCH, MICRO_BATCH)
    ]


def until_all_used(dataset: GPTDataset, batches: list[np.ndarray]) -> int:
    """How many batches it takes to use every block that the samples use at all."""
    used, last = set(), 0
    blocks = dataset.indexed._blocks
    for number, batch in enumerate(batches, 1):
        found = set(blocks.covering(*dataset._spans(dataset.index.shuffle_index[batch].astype(np.int64))))
        last = last if found <= used else number
        used |= found
    return last


def each_in_a_new_block(dataset: GPTDataset) -> np.ndarray:
    """One sample number for each block in which some sample begins, shuffled."""
    starts = dataset.index.sample_index[dataset.index.shuffle_index].astype(np.int64)
    at = dataset.indexed.offsets[dataset.index.document_index[starts[:, 0]]] + 2 * starts[:, 1]
    _, first = np.unique(at // BLOCK, return_index=True)
    return np.random.default_rng(0).permutation(first)


def report(measure: str, **found: object) -> None:
    shown = {
        name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in found.items()
    }
    print(json.dumps({"benchmark": "data_verification", "measure": measure, **shown}), flush=True)


def crc_rate(prefix: str) -> float:
    """GB/s of the checksums of the whole file."""
    indexed = open_indexed(prefix)
    begin = time.thread_time()
    indexed.validate(full=True)
    return indexed.tokens.nbytes / 1e9 / (time.thread_time() - begin)


def compare(
    prefix: str, args: argparse.Namespace, measure: str, batches: list[np.ndarray], warm: bool
) -> None:
    """Times of a sample with and without a guard, and what share of a step the difference is."""
    samples, rounds = sum(len(batch) for batch in batches), []
    for _ in range(args.rounds):
        pair = opened(prefix, args.seq_length, True), opened(prefix, args.seq_length, False)
        if warm:
            everything = np.array([0]), np.array([pair[0].indexed.tokens.nbytes])
            pair[0].indexed.guard.before_use(lambda spans=everything: spans)
            in_turn(pair, batches)
        rounds.append(in_turn(pair, batches))
    guarded, free = (statistics.median(column) / samples for column in zip(*rounds, strict=True))
    extra = statistics.median(a - b for a, b in rounds)
    per_step = extra / samples * args.samples_of_a_step
    report(
        measure,
        samples=samples,
        guarded_us=1e6 * guarded,
        free_us=1e6 * free,
        extra_seconds_in_all=extra,
        share_of_a_step=per_step / args.step_seconds,
        steps=samples / args.samples_of_a_step,
    )


def measure(prefix: str, args: argparse.Namespace) -> None:
    dataset = opened(prefix, args.seq_length, True)
    bytes_, blocks = dataset.indexed.tokens.nbytes, len(dataset.indexed._blocks)
    rates = [crc_rate(prefix) for _ in range(args.rounds)]
    report("crc", gb_per_s=statistics.median(rates), bytes=bytes_, blocks=blocks)
    batches = split(np.arange(len(dataset)))
    first = until_all_used(dataset, batches)
    compare(prefix, args, "first_pass", batches[:first], warm=False)
    compare(prefix, args, "afterwards", batches[:1000], warm=True)
    compare(prefix, args, "new_block_each", split(each_in_a_new_block(dataset)), warm=False)
    times = []
    for _ in range(100):
        begin = time.thread_time()
        changed_files(dataset)
        times.append(time.thread_time() - begin)
    report("looks", microseconds=1e6 * statistics.median(times))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-path", metavar="PREFIX", help="a dataset with checksums")
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--samples-of-a-step", type=int, default=16, help="that one rank reads")
    parser.add_argument(
        "--step-seconds", type=float, default=1.0, help="of the training, without its reading"
    )
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(args.data_path or make_dataset(Path(folder), 250_000_000), args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
