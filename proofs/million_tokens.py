"""One step on a sequence of a million tokens, shared by ranks and on one: equal losses, and the memory.

    python proofs/million_tokens.py --ranks 4

Trains one step of a small GPT on one sequence of 1,048,576 random tokens, on ranks that share it (processes
over Gloo), and on one rank that computes MLP and loss by tiles. Prints loss, gradient norm, seconds, and the
most memory that the processes held together, and exits 1 if losses or norms differ by more than rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROUNDING = 1e-5


def arguments(length: int, window: int, log: Path) -> list[str]:
    """The command line of the step."""
    return [
        *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
        *("--group-query-attention", "--num-query-groups", "2", "--ffn-hidden-size", "256"),
        *("--seq-length", str(length), "--max-position-embeddings", str(length)),
        *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"),
        *("--window-size", f"{window},0", "--window-sink-tokens", "4"),
        *("--hidden-dropout", "0", "--attention-dropout", "0", "--disable-bias-linear"),
        *("--micro-batch-size", "1", "--global-batch-size", "1", "--train-iters", "1", "--lr", "1e-3"),
        *("--tokenizer-type", "ByteLevelTokenizer", "--mock-data", "--num-workers", "0"),
        *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
        *("--mlp-tiles", "auto", "--recompute-logits", "--recompute-logits-tiles", "auto"),
        *("--eval-iters", "0", "--log-interval", "1", "--metrics-jsonl", str(log)),
        *("--distributed-timeout-minutes", "60", "--heartbeat-timeout-minutes", "30"),
    ]


def resident(pids: set[int]) -> int:
    """Bytes of memory that these processes hold, each page of their own counted once."""
    total = 0
    for pid in pids:
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return total


def family(pid: int) -> set[int]:
    """A process and its children, theirs included."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    members, queue = set(), [pid]
    while queue:
        one = queue.pop()
        members.add(one)
        queue += parents.get(one, [])
    return members


def step(ranks: int, comm: str, length: int, window: int) -> dict[str, Any]:
    """Train the step on so many ranks; what it says, and the most memory held."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "metrics.jsonl"
        shared = ["--context-parallel-size", str(ranks), "--cp-comm-type", comm] if ranks > 1 else []
        launch = [sys.executable]
        if ranks > 1:
            launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        threads = max(1, (os.cpu_count() or 1) // ranks)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
        command = [*launch, str(ROOT / "pretrain_gpt.py"), *arguments(length, window, log), *shared]
        began, most = time.monotonic(), 0
        with (Path(folder) / "output").open("w+") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            while process.poll() is None:
                most = max(most, resident(family(process.pid)))
                time.sleep(0.5)
            if process.returncode:
                output.seek(0)
                raise SystemExit(output.read()[-4000:])
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    row = next(row for row in rows if "lm_loss" in row)
    return {
        "ranks": ranks,
        "sends": comm if ranks > 1 else "",
        "loss": row["lm_loss"],
        "norm": row["grad_norm"],
        "seconds": time.monotonic() - began,
        "gib": most / 2**30,
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--comm", nargs="+", default=["p2p", "a2a"], help="what attention sends")
    parser.add_argument("--length", type=int, default=1 << 20, help="tokens")
    parser.add_argument("--window", type=int, default=4095, help="keys before its own that a token sees")
    args = parser.parse_args()
    results = [step(1, "", args.length, args.window)]
    print(json.dumps(results[0]), flush=True)
    for comm in args.comm:
        results.append(step(args.ranks, comm, args.length, args.window))
        print(json.dumps(results[-1]), flush=True)
    alone, *shared = results
    differs = [
        name
        for result in shared
        for name in ("loss", "norm")
        if abs(result[name] - alone[name]) > ROUNDING * abs(alone[name])
    ]
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
