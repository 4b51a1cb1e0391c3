"""Time and memory of the index of GPT's samples, for datasets whose `.bin` is a file without content.

    python benchmarks/index_build.py [--tokens N ...] [--mean T] [--sequence-length T] [--folder DIR]

For each number of tokens, and for both orders (shuffled in memory as Megatron's, and computed), a process
builds the index into a cache and another one loads it. Prints a JSON line for each: seconds, those of the
processor (opening the files included), samples read per second of the processor, the peak of resident memory
(pages of mapped files included), and the size of the cache.
"""

from __future__ import annotations

import argparse
import json
import resource
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.data.gpt_dataset import GPTDataset, GPTSettings
from megazero.data.indexed.reader import open_indexed

HEADER, UINT16 = b"MMIDIDX\x00\x00", 8
BLOCK = 1 << 20


def write_sparse(prefix: Path, tokens: int, mean: int) -> int:
    """Write a dataset of about `tokens` tokens, all 0; return its number of documents."""
    documents, rng, total = tokens // mean, np.random.default_rng(0), 0
    lengths = np.empty(documents, dtype=np.int32)
    for begin in range(0, documents, BLOCK):
        part = lengths[begin : begin + BLOCK]
        part[:] = rng.exponential(mean, part.size) + 1
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER + struct.pack("<QBQQ", 1, UINT16, documents, documents + 1))
        lengths.tofile(file)
        for begin in range(0, documents, BLOCK):
            ends = np.cumsum(lengths[begin : begin + BLOCK], dtype=np.int64)
            (2 * np.concatenate([[total], total + ends[:-1]])).astype(np.int64).tofile(file)
            total += int(ends[-1])
        for begin in range(0, documents + 1, BLOCK):
            np.arange(begin, min(begin + BLOCK, documents + 1), dtype=np.int64).tofile(file)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * total)
    return documents


def build(prefix: str, cache: str, sequence_length: int, memory_gib: float) -> dict[str, float]:
    """The figures of opening a dataset with its index."""
    before = resident()
    began, busy = time.perf_counter(), time.process_time()
    indexed = open_indexed(prefix)
    opened = time.perf_counter() - began
    settings = GPTSettings(sequence_length, cache_dir=cache, index_memory_gib=memory_gib)
    dataset = GPTDataset(indexed, range(len(indexed)), None, settings)
    seconds, busy = time.perf_counter() - began - opened, time.process_time() - busy
    rng = np.random.default_rng(1)
    batches = [rng.integers(0, len(dataset), 8) for _ in range(50)]
    for batch in batches:  # the pages are read
        dataset.batch(batch)
    began = time.process_time()
    for batch in batches:
        dataset.batch(batch)
    return {
        "documents": len(indexed),
        "samples": len(dataset),
        "computed": dataset.is_computed,
        "open_seconds": round(opened, 2),
        "index_seconds": round(seconds, 2),
        "processor_seconds": round(busy, 2),
        "samples_per_processor_second": round(400 / (time.process_time() - began)),
        "imports_mib": before,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "cache_mib": sum(path.stat().st_size for path in Path(cache).iterdir()) >> 20,
    }


def resident() -> int:
    """The resident memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) >> 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=float, nargs="+", default=[1e8, 1e9, 1e10])
    parser.add_argument("--mean", type=int, default=1000, help="tokens of a document")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--folder", default=None, help="where the files go, for a while")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        prefix, cache, length, memory = args.one
        print(json.dumps(build(prefix, cache, int(length), float(memory))))
        return
    for tokens in map(int, args.tokens):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            prefix = Path(folder) / "sparse"
            write_sparse(prefix, tokens, args.mean)
            for order, memory in (("shuffled", "1000"), ("computed", "1e-9")):
                for use in ("built", "loaded"):
                    cache = str(Path(folder) / order)
                    argv = [sys.executable, __file__, "--one", str(prefix), cache]
                    argv += [str(args.sequence_length), memory]
                    line = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
                    print(json.dumps({"tokens": tokens, "index": use, **json.loads(line)}), flush=True)


if __name__ == "__main__":
    main()
