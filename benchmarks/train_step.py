"""Training speed against other ways to train the same 23M-parameter GPT, interleaved in one run.

    python benchmarks/train_step.py --dtype bf16                 # one process, all cores' threads
    python benchmarks/train_step.py --dtype bf16 --ranks 2       # two ranks, the threads shared out

Every contender lives in processes of its own, which train in turn, a few steps each, round after round, so
that a noisy moment hits all alike. One JSON line each: median tokens/s over the rounds, the ratio to the
baseline of the median of per-round ratios, peak memory per rank, and the share of the matmul rate that was
measured in the same processes between the rounds. Contenders whose package is missing are left out, and said.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# name -> (module, function, ranks it runs on, package it needs)
CONTENDERS = {
    "eager": ("plain", "build", (1,), "torch"),
    "compiled": ("plain", "build_compiled", (1,), "torch"),
    "eager-allocator": ("plain", "build_tuned", (1,), "torch"),
    "ddp": ("plain", "build_ddp", (2,), "torch"),
    "fsdp2": ("fsdp2", "build", (2,), "torch"),
    "deepspeed-0": ("deepspeed_", "build_0", (1, 2), "deepspeed"),
    "deepspeed-1": ("deepspeed_", "build_1", (2,), "deepspeed"),
    "megatron-core": ("megatron", "build", (1, 2), "megatron.core"),
    "megatron-core-tp2": ("megatron", "build_tp2", (2,), "megatron.core"),
    "megazero": ("ours", "build", (1, 2), "torch"),
    "megazero-tp2": ("ours", "build_tp2", (2,), "torch"),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--ranks", type=int, choices=[1, 2], default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="in all, shared by the ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="per contender and round")
    parser.add_argument("--contenders", nargs="*", help=f"of {', '.join(CONTENDERS)}; default: all that fit")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file too")
    return parser.parse_args()


def serve(connection, name: str, shape, rank: int, world_size: int, threads: int, store: str) -> None:
    """One rank of one contender: builds, then trains whenever it is told to."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        import torch

        from megazero.train.flops import measure_matmul_rate

        torch.set_num_threads(threads)
        torch.manual_seed(0)
        if world_size > 1 or name.startswith(("deepspeed", "megatron")):
            import torch.distributed as dist

            backend = "nccl" if shape.device == "cuda" else "gloo"
            dist.init_process_group(
                backend, rank=rank, world_size=world_size, store=dist.FileStore(store, world_size)
            )
        module, function, _, _ = CONTENDERS[name]
        step = getattr(importlib.import_module(f"benchmarks.contenders.{module}"), function)(
            shape, rank, world_size
        )
        for _ in range(2):
            loss = step()
        connection.send(("ready", loss))
        while (steps := connection.recv()) is not None:
            rate = measure_matmul_rate(shape.torch_dtype, shape.device)
            start = time.perf_counter()
            for _ in range(steps):
                loss = step()
            seconds = time.perf_counter() - start
            if shape.device == "cuda":
                peak = torch.cuda.max_memory_allocated()
            else:
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            connection.send(("done", (seconds, rate, peak, loss)))
    except Exception:
        connection.send(("failed", traceback.format_exc()))


class Team:
    """The processes of one contender."""

    def __init__(self, name: str, shape, ranks: int, threads: int, folder: str):
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.connections = []
        self.processes = []
        self.rounds: list[dict] = []
        for rank in range(ranks):
            here, there = context.Pipe()
            store = str(Path(folder) / name)
            args = (there, name, shape, rank, ranks, threads, store)
            process = context.Process(target=serve, args=args, daemon=True)
            process.start()
            self.connections.append(here)
            self.processes.append(process)

    def ready(self) -> str | None:
        """Wait until it is built; a failure's traceback, or None."""
        answers = [c.recv() for c in self.connections]
        failed = [text for state, text in answers if state == "failed"]
        return failed[0] if failed else None

    def run(self, steps: int, tokens: int, flops_per_token: float) -> None:
        for connection in self.connections:
            connection.send(steps)
        answers = [c.recv() for c in self.connections]
        failed = [text for state, text in answers if state == "failed"]
        if failed:
            raise RuntimeError(f"{self.name}:\n{failed[0]}")
        results = [value for _, value in answers]
        speed = steps * tokens / max(seconds for seconds, *_ in results)
        rate = sum(r for _, r, _, _ in results)
        self.rounds.append(
            {
                "tokens_per_second": speed,
                "matmul_share": speed * flops_per_token / rate,
                "peak": max(peak for _, _, peak, _ in results),
                "loss": results[0][3],
            }
        )

    def close(self) -> None:
        for connection, process in zip(self.connections, self.processes, strict=True):
            with contextlib.suppress(BrokenPipeError):  # one that failed has left already
                connection.send(None)
            process.join(10)
            if process.is_alive():
                process.kill()


def wanted(args: argparse.Namespace) -> list[str]:
    """The contenders that run on so many ranks and whose package is here."""
    names = args.contenders or [n for n, (_, _, ranks, _) in CONTENDERS.items() if args.ranks in ranks]
    present = []
    for name in names:
        module, _, _, package = CONTENDERS[name]
        missing = importlib.util.find_spec(package.split(".")[0]) is None
        if missing or not (ROOT / "benchmarks" / "contenders" / f"{module}.py").exists():
            print(f"{name}: left out, {package} is not installed", file=sys.stderr)
        else:
            present.append(name)
    return present


def report(teams: list[Team], args: argparse.Namespace, baseline: str) -> list[dict]:
    base = next((t for t in teams if t.name == baseline), None)
    lines = []
    for team in teams:
        speeds = [r["tokens_per_second"] for r in team.rounds]
        line = {
            "benchmark": "train_step",
            "contender": team.name,
            "dtype": args.dtype,
            "ranks": args.ranks,
            "threads": args.threads,
            "device": args.device,
            "tokens_per_second": round(statistics.median(speeds), 1),
            "tokens_per_second_rounds": [round(s, 1) for s in speeds],
            "matmul_share": round(statistics.median(r["matmul_share"] for r in team.rounds), 3),
            "peak_mib_per_rank": round(max(r["peak"] for r in team.rounds) / 2**20),
            "loss": round(team.rounds[-1]["loss"], 4),
            "machine": f"{platform.machine()} {os.cpu_count()} cpus",
        }
        if base is not None:
            ratios = [a / b["tokens_per_second"] for a, b in zip(speeds, base.rounds, strict=True)]
            line[f"ratio_to_{baseline}"] = round(statistics.median(ratios), 3)
        lines.append(line)
    return lines


def main() -> int:
    args = arguments()
    from benchmarks.contenders import Shape
    from megazero.config.tree import ModelConfig
    from megazero.train.flops import flops_per_token

    shape = replace(Shape(), dtype=args.dtype, device=args.device, micro_batch=args.micro_batch)
    model = ModelConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        seq_length=shape.sequence,
    )
    flops = flops_per_token(model, shape.vocab)
    threads = max(1, args.threads // args.ranks)
    with tempfile.TemporaryDirectory() as folder:
        teams = []
        for name in wanted(args):
            team = Team(name, shape, args.ranks, threads, folder)
            failure = team.ready()
            if failure:
                print(f"{name}: failed to start\n{failure}", file=sys.stderr)
                team.close()
            else:
                teams.append(team)
        # A T=2 team of two ranks shares one batch; the others read one each.
        tokens = {t.name: shape.tokens_per_step * (1 if "tp2" in t.name else args.ranks) for t in teams}
        for _ in range(args.rounds):
            for team in teams:
                team.run(args.steps, tokens[team.name], flops)
        lines = report(teams, args, "eager" if args.ranks == 1 else "ddp")
        for team in teams:
            team.close()
    for line in lines:
        print(json.dumps(line))
    if args.output:
        with args.output.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
