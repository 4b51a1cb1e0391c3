"""Training steps of known shapes on one device: plain, as CUDA graphs, in 8-bit products, compiled.

    python benchmarks/device_step.py --device cuda --output gpu_device_step.jsonl
    python benchmarks/device_step.py --device cpu --tiny          # all of it, small, where there is no GPU
    python benchmarks/device_step.py --ways plain --trace DIR     # with a profiler's trace of a step of each

One JSON line for each way and shape: median tokens/s, share of the matmul rate measured beside it and of the
device's nominal one, peak memory, and how long the first step took, in which layers are compiled. All shapes
of a way come before the next way. What a machine refuses, what fails and what does not end is a line that
says so. The 6.7B shape has the width of its model and the layers that one GPU has room for.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.contenders import SHAPES as NAMED
from benchmarks.contenders import Shape
from benchmarks.contenders.ours import Trainer, make_config, vocabulary_of
from benchmarks.rows import Line, run_rows
from megazero.config.rules.table import check
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.acceleration import AccelerationConfig
from megazero.config.tree.parallel import ParallelConfig
from megazero.config.tree.zero import ZeroConfig
from megazero.errors import ConfigError
from megazero.mpu.context import solo_context
from megazero.mpu.launch import choose_device
from megazero.train.build import build_engine
from megazero.train.observe.host import measure_matmul_rate, nominal_matmul_rate
from megazero.train.parts.chunks import build_chunks

SHAPES = {name: shape for name, shape in NAMED.items() if name != "23M"}
TINY = {"layers": 2, "hidden": 64, "heads": 2, "sequence": 32, "vocab": 128, "micro_batch": 2}
WAYS = {
    "plain": {},
    "graphs": {"acceleration": {"cuda_graph": True}},
    "fp8": {"precision": {"fp8_format": "hybrid", "fp8_recipe": "delayed"}},
    "compiled": {"acceleration": {"compile": True}},
    "fp8-compiled": {
        "precision": {"fp8_format": "hybrid", "fp8_recipe": "delayed"},
        "acceleration": {"compile": True},
    },
}


def trainer(shape: Shape, way: str, backend: str) -> Trainer:
    """The engine for a shape.

    Raises:
        ConfigError: the way is refused here.
    """
    config = make_config(shape, 1, ParallelConfig(device=shape.device), ZeroConfig())
    sections = {name: dict(values) for name, values in WAYS[way].items()}
    acceleration = sections.pop("acceleration", {})
    if acceleration.get("compile"):
        acceleration["compile_backend"] = backend
    changes = {"acceleration": AccelerationConfig(**acceleration)}
    for name, values in sections.items():
        changes[name] = getattr(config, name).model_copy(update=values)
    config = config.model_copy(update=changes)
    wrong = check(config, 1)
    if wrong:
        raise ConfigError(wrong)
    context = solo_context(choose_device(shape.device, local_rank=0))
    chunks = build_chunks(config, vocabulary_of(shape), context)
    return Trainer(shape, build_engine(config, training_plan_of(config, 1), chunks, context), context)


def flops_per_token(shape: Shape) -> float:
    """Forward and backward, with half of the attention scores, which are causal."""
    layer = 24 * shape.hidden**2 + 2 * shape.sequence * shape.hidden
    return 3.0 * (shape.layers * layer + 2 * shape.hidden * shape.vocab)


def synchronize(shape: Shape) -> None:
    if shape.device == "cuda":
        torch.cuda.synchronize()


def measure(step: Trainer, shape: Shape, steps: int) -> Line:
    """One line's figures."""
    times = []
    for _ in range(steps + 3):
        synchronize(shape)
        began = time.perf_counter()
        loss = step()
        synchronize(shape)
        times.append(time.perf_counter() - began)
    rate = shape.tokens_per_step / statistics.median(times[3:])
    matmul, nominal = measure_matmul_rate(shape.torch_dtype, shape.device), None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    if shape.device == "cuda":
        peak, nominal = torch.cuda.max_memory_allocated(), nominal_matmul_rate(torch.cuda.get_device_name())
    flops = rate * flops_per_token(shape)
    return {
        "tokens_per_second": round(rate, 1),
        "matmul_tflops": round(matmul / 1e12, 3),
        "share_of_matmul_rate": round(flops / matmul, 4),
        "share_of_nominal_rate": None if nominal is None else round(flops / nominal, 4),
        "peak_bytes": peak,
        "first_step_seconds": round(times[0], 3),
        "loss": round(loss, 4),
    }


def trace(step: Trainer, shape: Shape, path: Path) -> None:
    """Write a trace of one step for Chrome's or Perfetto's viewer, gzipped."""
    synchronize(shape)
    with torch.profiler.profile() as profile:
        step()
        synchronize(shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(path))


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    device: str
    tiny: bool
    steps: int
    traces: Path | None


def line_of(row: str, asked: Asked) -> Line:
    """Work out one row, such as ``124M plain``."""
    name, _, way = row.rpartition(" ")
    shape = replace(SHAPES[name], device=asked.device, **(TINY if asked.tiny else {}))
    try:
        if asked.device == "cuda":
            torch.cuda.empty_cache()  # of the row before
            torch.cuda.reset_peak_memory_stats()
        step = trainer(shape, way, "aot_eager" if asked.tiny else "inductor")
    except ConfigError as error:
        return {"refused": str(error)}
    line = measure(step, shape, asked.steps)
    if asked.traces is not None:
        trace(step, shape, asked.traces / f"step_{row.split()[0]}_{way}.json.gz")
    return line


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes that are traced, not compiled")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=120, help="the time for all rows")
    parser.add_argument("--row-seconds", type=float, default=60, help="the time for one row")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="also write traces there")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    machine = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    rows = {f"{name} {way}": args.row_seconds for way in args.ways for name in args.shapes}
    asked, failed = Asked(args.device, args.tiny, args.steps, args.trace), False
    for row, figures in run_rows(partial(line_of, asked=asked), rows, args.seconds):
        name, _, way = row.rpartition(" ")
        line = {"benchmark": "device_step", "machine": machine, "torch": torch.__version__}
        line |= {"shape": name, "tiny": args.tiny, "way": way, **figures}
        failed |= "failed" in figures
        print(json.dumps(line), flush=True)
        if args.output is not None:
            with args.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
