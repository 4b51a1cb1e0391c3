"""Best-fit packing of documents with lengths like those of web text: time, memory, padding, documents cut.

    python benchmarks/packing.py [--documents N] [--lengths T ...] [--repeats R]

Prints a JSON line for each sequence length: the median seconds of packing and of checking a cached packing,
the peak memory of packing beside its input, the share of padding, and documents cut, with those that are cut
where documents lie end to end. Then samples of 2,048 tokens that are read per second, packed and end to end,
in batches of 8 that take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.data.gpt_dataset import DocumentEnds, GPTDataset, GPTSettings
from megazero.data.indexed.reader import open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data.packed.dataset import PackedDataset
from megazero.data.packed.packing import PackingFacts, pack, packing_fault

SEED = 1234
BATCH, READ = 8, 2048


def lengths_like_web_text(documents: int) -> np.ndarray:
    """int32 [n]: log-normal, with a median of 400 tokens and one document in 14 above 2,048."""
    drawn = np.random.default_rng(0).lognormal(np.log(400), 1.1, documents)
    return np.minimum(drawn + 1, 10**6).astype(np.int32)


def seconds(work: object, repeats: int) -> float:
    """The median time of calling `work`."""
    assert callable(work)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def packings(lengths: np.ndarray, sequence_length: int, repeats: int) -> dict[str, float]:
    """The figures of one sequence length."""
    ids = np.arange(len(lengths))
    tracemalloc.start()
    packing = pack(lengths, ids, sequence_length, SEED)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert packing_fault(vars(packing), lengths, ids, sequence_length) is None
    facts = PackingFacts.of(lengths, sequence_length, packing.sequences)
    ends = np.cumsum(lengths, dtype=np.int64)
    crossing = (ends - lengths) // sequence_length != (ends - 1) // sequence_length
    return {
        "documents": len(lengths),
        "sequence_length": sequence_length,
        "pack_seconds": seconds(lambda: pack(lengths, ids, sequence_length, SEED), repeats),
        "check_seconds": seconds(
            lambda: packing_fault(vars(packing), lengths, ids, sequence_length), repeats
        ),
        "peak_bytes_per_document": peak / len(lengths),
        "padding_share": facts.padding_share,
        "cut": facts.cut,
        "cut_end_to_end": int(crossing.sum()),
    }


def reading(repeats: int) -> dict[str, float]:
    """Samples per second of both kinds of datasets."""
    with tempfile.TemporaryDirectory() as folder:
        lengths = lengths_like_web_text(50_000)
        with IndexedDatasetWriter(Path(folder) / "text", "uint16") as writer:
            writer.add_raw(np.random.default_rng(1).integers(0, 50257, int(lengths.sum())), lengths)
        indexed = open_indexed(Path(folder) / "text")
        settings = GPTSettings(READ, SEED, ends=DocumentEnds(0, reset_attention_mask=True))
        kinds = {
            "packed": PackedDataset(indexed, range(len(lengths)), None, settings),
            "end_to_end": GPTDataset(indexed, range(len(lengths)), None, settings),
        }
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for start in range(0, BATCH * 20 * repeats, BATCH):
            for name, dataset in kinds.items():
                times[name].append(seconds(lambda d=dataset, s=start: d.batch(range(s, s + BATCH)), 1))
    return {f"{name}_samples_per_second": BATCH / statistics.median(took) for name, took in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 131072])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    lengths = lengths_like_web_text(args.documents)
    for sequence_length in args.lengths:
        print(json.dumps(packings(lengths, sequence_length, args.repeats)), flush=True)
    print(json.dumps(reading(args.repeats)))


if __name__ == "__main__":
    main()
