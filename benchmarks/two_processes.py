"""How much faster `megazero data preprocess` is on two processes than on one, and what keeps it from twice.

`python benchmarks/two_processes.py [--mb 220] [--rounds 5] [--cache DIR]` takes the corpus and the vocabulary
of `benchmarks/preprocess.py`, and runs the tool with 1 and 2 workers in turns, each on as many cores. A JSON
line has the ratio of the medians of elapsed time, and the load of the machine. Where others use the machine
that says little, so a second ratio is worked out from processor time: what the first process needs before and
after the workers' time (imports, the tokenizer, the index) cannot be shared, all else is shared evenly:
(serial + work of one) / (serial + work of two / 2).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.preprocess import prepare  # noqa: E402

_RUN = """import json, resource, sys, time
from megazero.data_tools import preprocess_data
from megazero.data_tools.preprocessing import pipeline
real, marks = pipeline.write, []
def write(*args):
    marks.append(time.process_time())
    result = real(*args)
    marks.append(time.process_time())
    return result
pipeline.write = write
status = preprocess_data.main()
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
workers = usage.ru_utime + usage.ru_stime
serial = time.process_time() - marks[1] + marks[0]
print(json.dumps([serial, marks[1] - marks[0] + workers]), file=sys.stderr)
sys.exit(status)
"""


def run(corpus: str, workers: int, cache: Path, prefix: str) -> tuple[float, float, float]:
    """Elapsed seconds from process start to exit, and processor seconds: of the serial part, of the rest."""
    flags = ["--input", corpus, "--output-prefix", prefix, "--append-eod", "--workers", str(workers)]
    files = ["--vocab-file", str(cache / "vocab.json"), "--merge-file", str(cache / "merges.txt")]
    cores = sorted(os.sched_getaffinity(0))[:workers]
    # Modules are compiled once, as in any installation: it takes 0.9 s where Python may not keep them.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache / "pyc")}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *flags, "--tokenizer-type", "GPT2BPETokenizer", *files],
        env=environment,
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    serial, work = json.loads(done.stderr.splitlines()[-1])
    return time.perf_counter() - start, serial, work


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mb", type=float, default=220, help="text of the corpus in MB")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each")
    parser.add_argument("--cache", metavar="DIR", help="keep corpus and vocabulary here (default: nowhere)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        cache = Path(args.cache or scratch)
        corpus, _ = prepare(cache, args.mb, 2)
        rows: dict[int, list[tuple[float, float, float]]] = {1: [], 2: []}
        load = []
        run(corpus.path, 1, cache, f"{scratch}/out")  # compiles modules
        for _ in range(args.rounds):
            for workers, results in rows.items():
                results.append(run(corpus.path, workers, cache, f"{scratch}/out"))
                load.append(os.getloadavg()[0])
    elapsed, serial, work = (
        {workers: statistics.median(row[part] for row in results) for workers, results in rows.items()}
        for part in range(3)
    )
    row = {
        "benchmark": "two_processes",
        "text_mb": round(corpus.text_bytes / 1e6, 1),
        "ratio_of_elapsed": round(elapsed[1] / elapsed[2], 2),
        "ratio_by_processor": round((serial[1] + work[1]) / (serial[2] + work[2] / 2), 2),
        "serial_s": [round(serial[workers], 2) for workers in rows],
        "work_s": [round(work[workers], 2) for workers in rows],
        "elapsed_s": [round(elapsed[workers], 2) for workers in rows],
        "load": round(statistics.median(load), 1),
    }
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
