"""Is attention on CPU slower than at another commit? Two checkouts, call by call in turn.

    python benchmarks/attention_commits.py OLD_DIR NEW_DIR --rounds 30

Both checkouts must be compiled. A process of each waits for its turn; times are processor time of one thread.
One JSON line for each case: `ratio` is the median over rounds of the new time divided by the old (above 1, it
became slower).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

CASES = {
    "fp32 256x2": ("float32", 256, 2),
    "fp32 1024": ("float32", 1024, 1),
    "bf16 256x2": ("bfloat16", 256, 2),
    "bf16 1024": ("bfloat16", 1024, 1),
}


def work() -> None:
    """Run the case that each line of the input names, and print its processor seconds."""
    import torch

    from megazero.ops.attention import attention

    torch.set_num_threads(1)
    tensors = {}
    for name, (dtype, s, b) in CASES.items():
        kind = getattr(torch, dtype)
        q, k, v = (torch.randn(s, b, 8, 64, dtype=kind, requires_grad=True) for _ in range(3))
        tensors[name] = q, k, v, torch.randn(s, b, 512, dtype=kind)
    for line in sys.stdin:
        q, k, v, grad = tensors[line.strip()]
        begin = time.process_time()
        attention(q, k, v, causal=True).backward(grad)
        print(time.process_time() - begin, flush=True)


def worker(folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--work"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=folder, env=environment)


def run(process: subprocess.Popen[str], case: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{case}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    """Compare the two, case by case."""
    if "--work" in sys.argv:
        work()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    workers = [worker(folder.resolve()) for folder in (args.old, args.new)]
    for case in CASES:
        times: list[list[float]] = [[], []]
        for number in range(args.rounds + 2):
            for which in ((0, 1), (1, 0))[number % 2]:
                times[which].append(run(workers[which], case))
        old, new = (own[2:] for own in times)
        ratio = statistics.median(y / x for x, y in zip(old, new, strict=True))
        line = {"case": case, "old ms": round(statistics.median(old) * 1e3, 2), "ratio": round(ratio, 3)}
        fastest = round(min(new) / min(old), 3)
        print(json.dumps({**line, "ratio of fastest": fastest, "load": os.getloadavg()[0]}), flush=True)
    for process in workers:
        process.communicate()


if __name__ == "__main__":
    main()
