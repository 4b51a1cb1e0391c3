"""Claim: preparation is many times faster than that of other programs, and gives the same ids.

`python benchmarks/preprocess_beside_others.py --megatron PYTHON --datasets PYTHON --datatrove PYTHON` turns
JSON lines into tokens by a byte-level BPE of GPT-2's size (the corpus of `benchmarks/preprocess.py`) with 1
worker on one core and 2 on two: by `megazero data preprocess`, megatron-core, `datasets` with `tokenizers`,
and datatrove, each by the Python that has it. They take turns; a JSON line for each has the seconds from
process start to exit, and those of processors, which say more where others use the machine. Others are slow,
so they get a slice (`--slice-mb`), which this package gets too, beside the whole corpus. The exit status is 1
if ids or lengths of any document differ.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.preprocess import Corpus, prepare  # noqa: E402
from megazero.data.indexed.reader import open_indexed  # noqa: E402

Documents = Iterator[np.ndarray]
_SUBREAPER = 36  # of prctl: processes whose parent has ended become this one's children


class Seconds(NamedTuple):
    """The seconds of a run from process start to exit, and those of processors in all of its processes."""

    elapsed: float
    processor: float


def of_indexed(prefix: Path) -> Documents:
    """The documents of `.bin` and `.idx`."""
    indexed = open_indexed(prefix)
    return (indexed.get(number) for number in range(len(indexed)))


def of_arrow(folder: Path) -> Documents:
    """The rows of Arrow files, in the order of their names."""
    import pyarrow

    for path in sorted(folder.glob("tokens*.arrow")):
        for batch in pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))):
            yield from (row.values.to_numpy() for row in batch.column("input_ids"))


def of_datatrove(folder: Path) -> Documents:
    """The documents of `.ds` and `.ds.index`."""
    for path in sorted(folder.glob("*.ds")):
        ends = np.fromfile(f"{path}.index", dtype="<u8").astype(np.int64)
        yield from np.split(np.fromfile(path, dtype="<u2"), ends[:-1])


@dataclass(frozen=True)
class Contender:
    """A program: its command before INPUT OUTPUT TOKENIZER WORKERS, how its output is read, its suffix."""

    name: str
    command: tuple[str, ...]
    read: Callable[[Path], Documents]
    end: str = ""

    def seconds(self, source: str, target: Path, cache: Path, workers: int) -> Seconds:
        """One run on as many cores as workers."""
        arguments = [source, str(target), str(cache / "tokenizer.json"), str(workers)]
        if not self.end:
            return _timed([*self.command, *arguments], workers, cache)
        flags = ["--input", source, "--output-prefix", str(target), "--append-eod", "--workers", str(workers)]
        flags += ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(cache / "vocab.json")]
        return _timed([*self.command, *flags, "--merge-file", str(cache / "merges.txt")], workers, cache)

    def digest(self, target: Path) -> tuple[int, str]:
        """The number of documents, and a digest of their ids and lengths."""
        content, count = hashlib.blake2b(), 0
        for ids in self.read(Path(f"{target}{self.end}")):
            content.update(len(ids).to_bytes(8, "little") + ids.astype("<u2").tobytes())
            count += 1
        return count, content.hexdigest()


def _processor_seconds() -> float:
    """Those of all processes that have ended; waits for those whose parent has."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _timed(command: list[str], workers: int, cache: Path) -> Seconds:
    cores = sorted(os.sched_getaffinity(0))[:workers]
    # Compiled modules are kept, as in any installation; offline, nothing is looked up.
    own = {
        "PYTHONPYCACHEPREFIX": str(cache / "pyc"),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = {**kept, **own, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    before, start = _processor_seconds(), time.perf_counter()
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    elapsed = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{command[1]} failed:\n{done.stderr[-2000:]}")
    return Seconds(elapsed, _processor_seconds() - before)


def contenders(args: argparse.Namespace) -> list[Contender]:
    """This package and the programs whose Python is given."""
    folder = Path(__file__).parent / "contenders" / "preprocessing"
    tool, name = str(ROOT / "data_tools" / "preprocess_data.py"), "_text_document"
    others = [
        Contender("megatron-core", (args.megatron, str(folder / "megatron_core.py")), of_indexed),
        Contender("datasets", (args.datasets, str(folder / "hf_datasets.py")), of_arrow),
        Contender("datatrove", (args.datatrove, str(folder / "with_datatrove.py")), of_datatrove),
    ]
    own = Contender("megazero", (sys.executable, tool), of_indexed, name)
    return [own, *(other for other in others if other.command[0] is not None)]


def split(corpus: Corpus, parts: int, folder: Path) -> str:
    """A folder with the corpus in as many files, of about equal bytes: datatrove's tasks are files."""
    lines = Path(corpus.path).read_bytes().splitlines(keepends=True)
    bounds = np.searchsorted(
        np.cumsum([*map(len, lines)]), np.linspace(0, os.path.getsize(corpus.path), parts + 1)
    )
    bounds[-1] = len(lines)
    folder.mkdir()
    for number in range(parts):
        (folder / f"{number}.jsonl").write_bytes(b"".join(lines[bounds[number] : bounds[number + 1]]))
    return str(folder)


def run(args: argparse.Namespace, scratch: Path) -> bool:
    """Prints a JSON line for each program and number of workers; True if all agree."""
    cache = Path(args.cache) if args.cache else scratch / "cache"
    whole, part = prepare(cache, args.mb, args.slice_mb)
    everyone = contenders(args)
    turns = [(program, part, workers) for program in everyone for workers in (1, 2)]
    turns = [(everyone[0], whole, 1), (everyone[0], whole, 2), *turns]
    folders = {workers: split(part, workers, scratch / f"split{workers}") for workers in (1, 2)}
    times: list[list[Seconds]] = [[] for _ in turns]
    digests: dict[tuple[str, str, int], tuple[int, str]] = {}
    compiled = (cache / "pyc").exists()
    for number in range(0 if compiled else -1, args.rounds):  # the first round compiles modules
        for (program, corpus, workers), seconds in zip(turns, times, strict=True):
            source = folders[workers] if program.name == "datatrove" else corpus.path
            (target := scratch / "out").mkdir()
            took = program.seconds(source, target / "o", cache, workers)
            if number >= 0:
                seconds.append(took)
                print(program.name, workers, corpus.text_bytes, took, file=sys.stderr, flush=True)
                key = (program.name, corpus.path, workers)
                digests[key] = digests.get(key) or program.digest(target / "o")
            shutil.rmtree(target)
    medians = [Seconds(*(statistics.median(column) for column in zip(*rows, strict=True))) for rows in times]
    for (program, corpus, workers), seconds, median in zip(turns, times, medians, strict=True):
        own = medians[turns.index((everyone[0], corpus, workers))]
        documents, digest = digests[program.name, corpus.path, workers]
        row = {
            "benchmark": "preprocess_beside_others",
            "program": program.name,
            "workers": workers,
            "text_mb": round(corpus.text_bytes / 1e6, 1),
            "seconds": [round(one.elapsed, 2) for one in seconds],
            "processor_seconds": [round(one.processor, 2) for one in seconds],
            "mb_of_text_per_s": round(corpus.text_bytes / 1e6 / median.elapsed, 2),
            "mb_of_text_per_processor_s": round(corpus.text_bytes / 1e6 / median.processor, 2),
            "to_megazero": round(median.elapsed / own.elapsed, 2),
            "to_megazero_by_processor": round(median.processor / own.processor, 2),
            "documents": documents,
            "same_ids": digest == digests["megazero", corpus.path, 1][1],
            "load": round(os.getloadavg()[0], 1),
        }
        print(json.dumps(row), flush=True)
    return all(digest == digests["megazero", path, 1] for (_, path, _), digest in digests.items())


def main() -> int:
    """Runs the benchmark; 0 if all ids agree."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, what in (
        ("megatron", "torch and megatron-core"),
        ("datasets", "datasets"),
        ("datatrove", "datatrove"),
    ):
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"a Python with {what} (default: left out)")
    parser.add_argument("--mb", type=float, default=200, help="text of the corpus in MB")
    parser.add_argument("--slice-mb", type=float, default=6, help="text that all programs get, in MB")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each")
    parser.add_argument("--cache", metavar="DIR", help="keep corpus and vocabulary here (default: nowhere)")
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # datatrove does not wait for all of its processes
    with tempfile.TemporaryDirectory() as scratch:
        return 0 if run(parser.parse_args(), Path(scratch)) else 1


if __name__ == "__main__":
    sys.exit(main())
