"""Fuzz of the indexed-dataset reader: damaged files must be refused or read exactly as before.

    python proofs/fuzz_index.py --count 100000

Each case takes a sound dataset, damages one of its files (flipped bits, overwritten or swapped fields,
hostile counts, truncation, extension) and opens and reads everything. There are five situations, see
`SITUATIONS`. Prints one JSON line and exits 1 unless `silent_wrong` and `crashed` (any exception but
DataError) are 0. What no reader of the format can see without checksums is counted separately and not hidden:
`boundaries_moved`, document boundaries that moved between sequences which themselves read correctly. Flipped
bits in a `.bin` without `.sum` are not tried.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.data.indexed.reader import IndexedDataset, open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.errors import DataError

INTERESTING = (0, 1, 2, 3, 33, 34, 127, 128, 255, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40)
INTERESTING += ((1 << 61) + 1, (1 << 62) // 3, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) // 12)


@dataclass(frozen=True)
class Sound:
    """A whole dataset as bytes, and what reading it must return."""

    files: dict[str, bytes]
    sequences: tuple[tuple[int, ...], ...]
    boundaries: tuple[int, ...]


@dataclass(frozen=True)
class Situation:
    """Which file is damaged, whether the checksum sidecar is there, and whether tokens are verified."""

    target: str
    sidecar: bool
    verify: bool
    resize_only: bool = False


SITUATIONS = {
    "idx": Situation(".idx", sidecar=False, verify=False),
    "idx+sum": Situation(".idx", sidecar=True, verify=False),
    "bin+sum": Situation(".bin", sidecar=True, verify=True),
    "bin size": Situation(".bin", sidecar=False, verify=False, resize_only=True),
    "sum": Situation(".sum", sidecar=True, verify=True),
}


def flip_bit(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    data[at] ^= 1 << rng.randrange(8)


def set_bytes(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randrange(1, 5)):
        data[rng.randrange(len(data))] = rng.randrange(256)


def set_field(data: bytearray, rng: random.Random) -> None:
    """An integer field of 1, 4 or 8 bytes, by preference in the header, gets an interesting value."""
    width, code = rng.choice(((1, "<B"), (4, "<I"), (8, "<Q")))
    at = rng.choice((9, 17, 18, 26, 34, 42, rng.randrange(max(1, len(data) - width + 1))))
    if at + width <= len(data):
        value = rng.choice(INTERESTING) + rng.choice((-1, 0, 0, 1))
        struct.pack_into(code, data, at, value % (1 << (8 * width)))


def set_counts(data: bytearray, rng: random.Random) -> None:
    """Both counts change so that the file size still agrees: S and D trade 12 S against 8 D."""
    if len(data) >= 34:
        sequences, entries = struct.unpack_from("<QQ", data, 18)
        step = rng.randrange(-3, 4)
        struct.pack_into(
            "<QQ", data, 18, (sequences + 2 * step) % (1 << 64), (entries - 3 * step) % (1 << 64)
        )


def swap_fields(data: bytearray, rng: random.Random) -> None:
    width = rng.choice((1, 2, 4, 8))
    if len(data) >= 2 * width:
        a, b = rng.randrange(len(data) - width + 1), rng.randrange(len(data) - width + 1)
        data[a : a + width], data[b : b + width] = data[b : b + width], data[a : a + width]


def truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def extend(data: bytearray, rng: random.Random) -> None:
    data += rng.randbytes(rng.choice((1, 2, 4, 8, 12, 20, 34, 4096)))


def remove_middle(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.choice((1, 2, 4, 8, 12))]


RESIZING = (truncate, extend, remove_middle)
MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    flip_bit, flip_bit, set_bytes, set_field, set_field, set_counts, swap_fields, *RESIZING,
)  # fmt: skip


def sound_datasets(directory: Path) -> list[Sound]:
    """Datasets of different element types, with empty sequences and documents among them."""
    rng = np.random.default_rng(7)
    sound = []
    for dtype, highest in (("uint16", 65535), ("uint16", 300), ("int32", 128000), ("uint8", 255)):
        prefix = directory / f"sound-{len(sound)}"
        with IndexedDatasetWriter(prefix, dtype) as writer:
            for _ in range(8):
                lengths = rng.integers(0, 12, rng.integers(0, 4))
                writer.add_document([rng.integers(0, highest + 1, n) for n in lengths])
        dataset = open_indexed(prefix)
        files = {suffix: Path(f"{prefix}{suffix}").read_bytes() for suffix in (".idx", ".bin", ".sum")}
        sequences = tuple(tuple(s.tolist()) for s in dataset)
        sound.append(Sound(files, sequences, tuple(dataset.document_index.tolist())))
    return sound


def outcome(prefix: Path, sound: Sound, verify: bool) -> str:
    """Opens and reads all of `prefix` and compares it with the truth."""
    try:
        dataset: IndexedDataset = open_indexed(prefix, verify=verify)
        sequences = tuple(tuple(dataset.get(i).tolist()) for i in range(len(dataset)))
        documents = [dataset.document(k) for k in range(dataset.document_index.size - 1)]
    except DataError:
        return "refused"
    except Exception as error:
        print(f"crashed: {type(error).__name__}: {error}", file=sys.stderr)
        return "crashed"
    if sequences != sound.sequences:
        return "silent_wrong"
    if (0, *np.cumsum([len(d) for d in documents]).tolist()) != sound.boundaries:
        return "boundaries_moved"
    return "opened_equal"


def fuzz(count: int, seed: int, directory: Path) -> Counter[tuple[str, str]]:
    """Outcomes of `count` cases by (situation, outcome); the same seed tries the same cases."""
    rng = random.Random(seed)
    datasets = sound_datasets(directory)
    names = list(SITUATIONS)
    prefix = directory / "damaged"
    found: Counter[tuple[str, str]] = Counter()
    for number in range(count):
        name, sound = names[number % len(names)], rng.choice(datasets)
        situation = SITUATIONS[name]
        damaged = bytearray(sound.files[situation.target])
        rng.choice(RESIZING if situation.resize_only else MUTATIONS)(damaged, rng)
        for suffix, content in sound.files.items():
            path = Path(f"{prefix}{suffix}")
            if suffix == ".sum" and not situation.sidecar:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(damaged if suffix == situation.target else content)
        result = outcome(prefix, sound, situation.verify)
        if result == "boundaries_moved" and situation.sidecar:
            result = "silent_wrong"
        found[name, result] += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100_000, help="damaged files to try")
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        found = fuzz(args.count, args.seed, Path(directory))
    outcomes = ("opened_equal", "refused", "silent_wrong", "crashed", "boundaries_moved")
    totals = {o: sum(n for (_, result), n in found.items() if result == o) for o in outcomes}
    by_situation = {s: {o: found[s, o] for o in outcomes if found[s, o]} for s in SITUATIONS}
    seconds = round(time.perf_counter() - begin, 1)
    line = {"benchmark": "fuzz_index", "count": args.count, "seed": args.seed, **totals}
    print(json.dumps({**line, "by_situation": by_situation, "seconds": seconds}))
    return 1 if totals["silent_wrong"] or totals["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
