"""Samples read from an object store against samples read from local files.

    python benchmarks/object_storage.py [--tokens N] [--sequence-length T] [--document N] [--batches N]

Starts SeaweedFS on this machine, puts a synthetic corpus there and prints one JSON line per measurement:

`cold`: a training's first batches with an empty cache: seconds to open the dataset and to the first batch,
samples per second, and bytes read for each byte of the samples, after some batches and after an epoch.
`in_order`: the same for an epoch of the documents in their order. `small_cache`: shuffled samples where the
cache holds an eighth of the tokens. `warm`: samples per second from a full cache and from files, in turns;
`ratio` of the medians is above 1 where the store is faster.
Each with the 4 MiB blocks of a dataset with checksums (`.sum`) and the 256 KiB blocks of one without.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.data.gpt_dataset import GPTDataset, GPTSettings
from megazero.data.indexed.reader import IndexedDataset, open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data.sampler import BatchSampler, SamplerSpec
from megazero.storage.cached import Cache
from megazero.storage.objects import Objects
from megazero.storage.urls import Url
from megazero.train.step.feed import make_feed
from tests.storage.servers import seaweed

BATCH = 8
URL = "s3://bucket/text"


class Counted(Objects):
    """Objects whose ranges are counted. read: bytes."""

    read = 0

    def piece(self, name: str, start: int, end: int, tag: str) -> memoryview:
        Counted.read += end - start
        return super().piece(name, start, end, tag)


def write(folder: Path, tokens: int, document: int) -> Path:
    """A corpus of documents of geometric lengths with the mean `document`."""
    stream = np.random.default_rng(1)
    lengths = stream.geometric(1 / document, tokens // document)
    with IndexedDatasetWriter(folder / "text", "uint16") as writer:
        for part in np.array_split(lengths, 20):
            writer.add_raw(stream.integers(0, 50000, int(part.sum())), part)
    return folder / "text"


def samples(indexed: IndexedDataset, length: int) -> GPTDataset:
    """One epoch of samples."""
    return GPTDataset(indexed, range(len(indexed)), None, GPTSettings(length))


def read_ahead(dataset: GPTDataset, batches: Iterable[int]) -> None:
    """Read batches as a training does."""
    feed = make_feed(
        dataset, BatchSampler(SamplerSpec(len(dataset), BATCH)), lambda arrays, samples: arrays, 2
    )
    for number in batches:
        feed.micro_batches(number * BATCH, 1)
    feed.close()


def cold(cache: Cache, guarded: bool, length: int, some: int) -> dict[str, object]:
    """The beginning of a training."""
    Counted.read, start = 0, time.perf_counter()
    indexed = open_indexed(URL, guarded=guarded, cache=cache)
    opened = time.perf_counter()
    dataset = samples(indexed, length)
    dataset.batch(range(BATCH))
    first = time.perf_counter()
    read_ahead(dataset, range(1, some))
    then = time.perf_counter()
    size = 2 * length
    row: dict[str, object] = {
        "what": "cold",
        "open_s": round(opened - start, 3),
        "first_batch_s": round(first - opened, 3),
        f"samples_per_second_of_{some}_batches": round((some - 1) * BATCH / (then - first), 1),
        f"read_per_used_after_{some}_batches": round(Counted.read / (some * BATCH * size), 2),
    }
    epoch = len(dataset) // BATCH
    read_ahead(dataset, range(some, epoch))
    row["epoch_samples_per_second"] = round(epoch * BATCH / (time.perf_counter() - opened), 1)
    row["read_per_used_after_an_epoch"] = round(Counted.read / (epoch * BATCH * size), 3)
    return row


def in_order(cache: Cache, guarded: bool, length: int, some: int) -> dict[str, object]:
    """Every document once, as they lie in the file."""
    indexed = open_indexed(URL, guarded=guarded, cache=cache)
    Counted.read, start, used = 0, time.perf_counter(), 0
    for begin in range(0, len(indexed), 500):
        spans = indexed.offsets[begin : begin + 500], indexed.lengths[begin : begin + 500]
        begins, ends = spans[0], spans[0] + 2 * spans[1].astype(np.int64)
        with indexed.guard.using(lambda spans=(begins, ends): spans):
            used += int(indexed.tokens[begins[0] // 2 : ends[-1] // 2].size) * 2
    seconds = time.perf_counter() - start
    return {
        "what": "in_order",
        "read_per_used": round(Counted.read / used, 3),
        "mb_per_second": round(used / seconds / 1e6, 1),
    }


def small_cache(cache: Cache, guarded: bool, length: int, some: int) -> dict[str, object]:
    """Shuffled samples, most of whose blocks are not there."""
    dataset = samples(open_indexed(URL, guarded=guarded, cache=cache), length)
    Counted.read, start = 0, time.perf_counter()
    read_ahead(dataset, range(some))
    return {
        "what": "small_cache",
        "samples_per_second": round(some * BATCH / (time.perf_counter() - start), 1),
        "read_per_used": round(Counted.read / (some * BATCH * 2 * length), 1),
    }


def warm(cache: Cache, guarded: bool, length: int, files: Path) -> dict[str, object]:
    """An epoch from a full cache and one from files, five times in turns."""
    datasets = {
        "files": samples(open_indexed(files, guarded=guarded), length),
        "store": samples(open_indexed(URL, guarded=guarded, cache=cache), length),
    }
    speeds: dict[str, list[float]] = {name: [] for name in datasets}
    for turn in range(6):
        for name, dataset in datasets.items():
            count, start = len(dataset) // BATCH, time.perf_counter()
            for number in range(count):
                dataset.batch(range(number * BATCH, (number + 1) * BATCH))
            if turn:  # in the first, blocks are compared with their checksums
                speeds[name].append(count * BATCH / (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    return {
        "what": "warm",
        **{name: round(value, 1) for name, value in medians.items()},
        "ratio": round(medians["store"] / medians["files"], 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32_000_000)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--document", type=int, default=600, help="mean tokens of a document")
    parser.add_argument("--batches", type=int, default=16, help="the first batches, of 8 samples")
    flags = parser.parse_args()
    import megazero.storage.dataset as module

    module.Objects = Counted  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as name, seaweed() as server:
        os.environ.update(server.environment)
        files = write(Path(name), flags.tokens, flags.document)
        for suffix in (".idx", ".bin", ".sum"):
            Objects(Url.parse("s3://bucket")).put(f"text{suffix}", Path(f"{files}{suffix}"))
        size = Path(f"{files}.bin").stat().st_size
        for guarded in (True, False):
            block = "4 MiB" if guarded else "256 KiB"
            caches = [Cache(f"{name}/{kind}{guarded}") for kind in ("cold", "order")]
            small = Cache(f"{name}/small", size / 8 / (1 << 30))
            length, some = flags.sequence_length, flags.batches
            print(json.dumps({"block": block, **cold(caches[0], guarded, length, some)}), flush=True)
            print(json.dumps({"block": block, **warm(caches[0], guarded, length, files)}), flush=True)
            print(json.dumps({"block": block, **in_order(caches[1], guarded, length, some)}), flush=True)
            if not guarded:
                print(json.dumps({"block": block, **small_cache(small, guarded, length, some)}), flush=True)


if __name__ == "__main__":
    main()
