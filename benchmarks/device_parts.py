"""The two parts in which a training step spends most of its time on a GPU, each in the ways that there are.

    python benchmarks/device_parts.py --parts attention --output gpu_attention.jsonl
    python benchmarks/device_parts.py --parts linear --output gpu_linear.jsonl
    python benchmarks/device_parts.py --device cpu --tiny

`attention`: causal attention by each of torch's backends (cuDNN, flash, efficient, math), and by the one that
it chooses itself. `linear`: a linear layer in bf16 and in 8-bit floats with its scales and casts, and the
bare product of both. The shapes are those of `device_step.py`. One JSON line for each part, shape and way:
microseconds of forward and of backward, TFLOP/s of both together, and their share of the device's nominal
bf16 rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.contenders import Shape
from benchmarks.device_step import SHAPES, TINY
from benchmarks.kernels_gpu import seconds_of
from benchmarks.rows import Line, run_rows
from megazero.config.tree.precision import PrecisionConfig
from megazero.layers.fp8 import Fp8Recipe, Fp8Scaling, fp8_product
from megazero.mpu.solo_group import SoloGroup
from megazero.ops.to_fp8 import to_fp8
from megazero.train.observe.host import nominal_matmul_rate

BACKENDS = {
    "chosen": None,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
MATRICES = {"qkv": (3, 1), "out": (1, 1), "up": (4, 1), "down": (1, 4)}
"""Columns and rows of a layer's weights, in hidden sizes."""
LINEARS = ("bf16", "fp8", "bf16 product", "fp8 product")
WAYS = {"attention": tuple(BACKENDS), "linear": tuple(f"{m} {way}" for m in MATRICES for way in LINEARS)}


@dataclass(frozen=True)
class Task:
    """Work that is timed.

    Attributes:
        forward: makes the output.
        leaves: the tensors whose gradients backward computes; without any there is no backward.
        flops: of forward; backward has `more` times as many.
    """

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    flops: float
    more: float = 2.0


def attention(shape: Shape, way: str) -> Task:
    """Causal attention as a model of this shape calls it, with half of the scores."""
    size = (shape.micro_batch, shape.heads, shape.sequence, shape.hidden // shape.heads)
    like = {"device": shape.device, "dtype": torch.bfloat16, "requires_grad": True}
    # A layer's queries, keys and values are [s, b, n, d], of which the operator sees a transposed view.
    q, k, v = (torch.randn(size[2], size[0], size[1], size[3], **like) for _ in range(3))
    backend = BACKENDS[way]

    def forward() -> Tensor:
        views = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
        if backend is None:
            return F.scaled_dot_product_attention(*views, is_causal=True)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*views, is_causal=True)

    return Task(forward, (q, k, v), 2.0 * size[0] * size[1] * size[2] ** 2 * size[3], more=2.5)


def linear(shape: Shape, way: str) -> Task:
    """A layer's matrix times the rows of a micro-batch."""
    matrix, _, kind = way.partition(" ")
    n, k = (multiple * shape.hidden for multiple in MATRICES[matrix])
    rows = shape.sequence * shape.micro_batch
    like = {"device": shape.device, "dtype": torch.bfloat16}
    x = torch.randn(shape.sequence, shape.micro_batch, k, **like).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(n, k, **like) * 0.02)
    flops = 2.0 * rows * n * k
    if kind == "bf16":
        return Task(lambda: F.linear(x, weight), (x, weight), flops)
    if kind == "fp8":
        recipe = Fp8Recipe.of(PrecisionConfig(fp8_format="hybrid", fp8_recipe="delayed"))
        scaling = Fp8Scaling("layer", recipe, SoloGroup(), False, torch.device(shape.device))
        return Task(lambda: scaling(x, weight, None, SoloGroup(), False), (x, weight), flops)
    a, b = x.detach().flatten(0, 1), weight.detach()
    if kind == "bf16 product":
        return Task(lambda: a @ b.t(), (), flops)
    one = torch.ones((), device=shape.device)
    codes = [to_fp8(matrix, one, torch.float8_e4m3fn)[0] for matrix in (a, b)]
    return Task(lambda: fp8_product(*codes, one, one, torch.bfloat16), (), flops)


PARTS = {"attention": attention, "linear": linear}


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    device: str
    tiny: bool
    rounds: int


def line_of(row: str, asked: Asked) -> Line:
    """Work out one row, such as ``attention/124M/flash``: the median of the rounds."""
    part, name, way = row.split("/")
    sizes = TINY if asked.tiny else {}
    shape = Shape(**{**vars(SHAPES[name]), "device": asked.device, **sizes})
    task, times = PARTS[part](shape, way), 1 if asked.tiny else 20
    out = task.forward()
    passes: dict[str, Callable[[], object]] = {"forward": task.forward}
    if task.leaves:
        grad = torch.randn_like(out)
        passes["backward"] = lambda: torch.autograd.grad(out, task.leaves, grad, retain_graph=True)
    seconds = {}
    for kind, work in passes.items():
        work()
        seconds[kind] = statistics.median(seconds_of(work, asked.device, times) for _ in range(asked.rounds))
    rate = task.flops * (1 + task.more * bool(task.leaves)) / sum(seconds.values())
    line = {f"{kind}_us": round(value * 1e6, 2) for kind, value in seconds.items()}
    nominal = nominal_matmul_rate(torch.cuda.get_device_name()) if asked.device == "cuda" else None
    share = None if nominal is None else round(rate / nominal, 4)
    return {**line, "tflops": round(rate / 1e12, 3), "share_of_nominal_rate": share}


def main() -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, one round")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["124M", "350M", "1.3B"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=120, help="the time for all rows")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    asked = Asked(args.device, args.tiny, 1 if args.tiny else args.rounds)
    names = [f"{part}/{shape}/{way}" for part in args.parts for shape in args.shapes for way in WAYS[part]]
    ours_failed = False
    for row, figures in run_rows(partial(line_of, asked=asked), dict.fromkeys(names, 30.0), args.seconds):
        part, shape, way = row.split("/")
        line = {
            "benchmark": "device_parts",
            "part": part,
            "shape": shape,
            "tiny": args.tiny,
            "way": way,
            **figures,
        }
        # A backend of torch's may refuse a device or a shape, which is worth a line and no more.
        ours_failed |= "failed" in figures and not (part == "attention" and way != "chosen")
        print(json.dumps(line), flush=True)
        if args.output is not None:
            with args.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    return int(ours_failed)


if __name__ == "__main__":
    sys.exit(main())
