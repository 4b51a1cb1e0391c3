"""Training steps of known shapes on one device: plain, compiled, as CUDA graphs, in 8-bit products.

    python benchmarks/device_step.py --device cuda --output benchmarks/results/gpu_device_step.jsonl
    python benchmarks/device_step.py --device cpu --tiny          # all of it, small, where there is no GPU

One JSON line for each shape and way: median tokens/s, share of the matmul rate measured beside it, peak
memory, and how long the first step took, in which layers are compiled. What a machine refuses is a line that
says why. The 6.7B shape has the width of its model and the layers that one GPU has room for.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.contenders import Shape
from benchmarks.contenders.ours import Trainer, make_config, vocabulary_of
from megazero.config.rules.table import check
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.acceleration import AccelerationConfig
from megazero.config.tree.parallel import ParallelConfig
from megazero.config.tree.zero import ZeroConfig
from megazero.errors import ConfigError
from megazero.mpu.context import solo_context
from megazero.train.build import build_engine
from megazero.train.observe.host import measure_matmul_rate
from megazero.train.parts.chunks import build_chunks

SHAPES = {
    "124M": Shape(layers=12, hidden=768, heads=12, sequence=1024, vocab=50304, micro_batch=16),
    "1.3B": Shape(layers=24, hidden=2048, heads=16, sequence=2048, vocab=50304, micro_batch=4),
    "6.7B (8 of 32 layers)": Shape(
        layers=8, hidden=4096, heads=32, sequence=2048, vocab=50304, micro_batch=4
    ),
}
TINY = {"layers": 2, "hidden": 64, "heads": 2, "sequence": 32, "vocab": 128, "micro_batch": 2}
WAYS = {
    "plain": {},
    "compiled": {"acceleration": {"compile": True}},
    "graphs": {"acceleration": {"cuda_graph": True}},
    "fp8": {"precision": {"fp8_format": "hybrid", "fp8_recipe": "delayed"}},
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
    context = solo_context(torch.device(shape.device))
    chunks = build_chunks(config, vocabulary_of(shape), context)
    return Trainer(shape, build_engine(config, training_plan_of(config, 1), chunks, context), context)


def flops_per_token(shape: Shape) -> float:
    """Forward and backward, with half of the attention scores, which are causal."""
    layer = 24 * shape.hidden**2 + 2 * shape.sequence * shape.hidden
    return 3.0 * (shape.layers * layer + 2 * shape.hidden * shape.vocab)


def synchronize(shape: Shape) -> None:
    if shape.device == "cuda":
        torch.cuda.synchronize()


def measure(shape: Shape, way: str, steps: int, backend: str) -> dict:
    """One line's figures."""
    if shape.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step, times = trainer(shape, way, backend), []
    for _ in range(steps + 3):
        synchronize(shape)
        began = time.perf_counter()
        loss = step()
        synchronize(shape)
        times.append(time.perf_counter() - began)
    rate = shape.tokens_per_step / statistics.median(times[3:])
    matmul = measure_matmul_rate(shape.torch_dtype, shape.device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    if shape.device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    return {
        "tokens_per_second": round(rate, 1),
        "share_of_matmul_rate": round(rate * flops_per_token(shape) / matmul, 4),
        "peak_bytes": peak,
        "first_step_seconds": round(times[0], 3),
        "loss": round(loss, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes that are traced, not compiled")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=120, help="begin no further way after so long")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    began, failed = time.monotonic(), False
    backend = "aot_eager" if args.tiny else "inductor"
    machine = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    for name in args.shapes:
        shape = replace(SHAPES[name], device=args.device, **(TINY if args.tiny else {}))
        for way in args.ways:
            line = {"benchmark": "device_step", "machine": machine, "torch": torch.__version__}
            line |= {"shape": name, "tiny": args.tiny, "way": way}
            if time.monotonic() - began > args.seconds:
                line["left_out"] = f"{args.seconds:g} s had passed"
            else:
                try:
                    line |= measure(shape, way, args.steps, backend)
                except ConfigError as error:
                    line["refused"] = str(error)
                except RuntimeError as error:
                    line["failed"], failed = str(error).splitlines()[0], True
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
            print(json.dumps(line), flush=True)
            if args.output is not None:
                with args.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
