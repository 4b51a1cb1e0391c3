"""Rates of the CUDA kernels beside a copy, torch, torch.compile and, where installed, Liger and apex.

    python benchmarks/kernels_gpu.py --output benchmarks/results/gpu_kernels.jsonl
    python benchmarks/kernels_gpu.py --only norm cross_entropy --dtypes bf16 fp32
    python benchmarks/kernels_gpu.py --device cpu      # tiny, on the imitation: that it runs, not how fast

Contenders take turns within a round, and medians are compared. Tensors are several times as large as the
cache. One JSON line per kernel, pass, dtype and contender: microseconds, GB/s over the bytes that any
implementation must move, and the share of the copy's rate, which is measured in the same rounds. A contender
that fails has a line with its error, and the exit status is 1 if ours does.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.rows import Line, run_rows
from megazero.kernels.build import build, on_cpu_recipe
from megazero.kernels.library import KernelLibrary
from megazero.kernels.on_cpu import WatchedLibrary
from megazero.mpu.solo_group import SoloGroup
from megazero.ops.bias_dropout_add import bias_dropout_add_cuda, bias_dropout_add_reference
from megazero.ops.bias_gelu import bias_gelu_cuda, bias_gelu_reference
from megazero.ops.cross_entropy import VocabularySlice, vocab_parallel_cross_entropy_cuda
from megazero.ops.cuda import cuda_built, cuda_kernels
from megazero.ops.dropout import Dropout
from megazero.ops.embedding import embedding_cuda
from megazero.ops.layer_norm import layer_norm_cuda, layer_norm_reference
from megazero.ops.quantize import Quantization, quantize_cuda, quantize_reference
from megazero.ops.rms_norm import rms_norm_cuda, rms_norm_reference
from megazero.ops.rotary import apply_rotary_cuda, apply_rotary_reference, rotary_table
from megazero.ops.scaled_softmax import scaled_softmax_cuda, scaled_softmax_reference
from megazero.ops.square_sum import square_sum_cuda
from megazero.ops.swiglu import swiglu_cuda, swiglu_reference
from megazero.ops.update import StepFacts, UpdateCall, update_cuda
from megazero.optim.elementwise import Adam

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TARGET = 0.85  # of the copy's rate
KERNELS = {
    "norms": ("layer_norm", "rms_norm"),
    "activations": ("bias_gelu", "swiglu"),
    "attention_parts": ("bias_dropout_add", "rotary", "scaled_softmax"),
    "vocabulary": ("cross_entropy", "embedding"),
    "state": ("quantize", "square_sum", "adam"),
}
"""The operators that are timed, by the method of `TaskMaker` that makes them."""
ROW_SECONDS = 90.0


@dataclass(frozen=True)
class Sizes:
    """Rows, their width, the vocabulary: large enough to leave the cache, or tiny."""

    rows: int
    width: int
    vocabulary: int


@dataclass(frozen=True)
class RateTask:
    """One operator at one size.

    Attributes:
        name: of the operator.
        inputs: its tensors; those that require grad are differentiated.
        ours: the call by our kernels.
        others: further contenders, by name.
        forward, backward: bytes that must be moved; backward 0 if there is none.
    """

    name: str
    inputs: tuple[Tensor, ...]
    ours: Callable[..., Tensor]
    others: dict[str, Callable[..., Tensor]] = field(default_factory=dict)
    forward: int = 0
    backward: int = 0


class TaskMaker:
    """Makes the tasks of one device, dtype and size; plain torch is the formula of their references."""

    def __init__(self, kernels: KernelLibrary, device: str, dtype: torch.dtype, sizes: Sizes):
        self.kernels, self.device, self.dtype, self.sizes = kernels, device, dtype, sizes
        self.bytes = sizes.rows * sizes.width * dtype.itemsize  # of one activation

    def leaf(self, *shape: int, of: torch.dtype | None = None) -> Tensor:
        """Random values that want a gradient."""
        return torch.randn(*shape, device=self.device).to(of or self.dtype).requires_grad_()

    def task(self, name: str) -> RateTask:
        """The operator of this name, one of those in `KERNELS`."""
        (group,) = (group for group, names in KERNELS.items() if name in names)
        return next(task for task in getattr(self, group)() if task.name == name)

    def plain(self, formula: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
        """The formula by torch's operators, and compiled; on a CPU it is only traced."""
        backend = "aot_eager" if self.device == "cpu" else "inductor"
        return {"torch": formula, "compiled": torch.compile(formula, dynamic=False, backend=backend)}

    def norms(self) -> Iterator[RateTask]:
        """The norms, with their weight gradients."""
        rows, width = self.sizes.rows, self.sizes.width
        weight, bias = self.leaf(width, of=torch.float32), self.leaf(width, of=torch.float32)
        yield RateTask(
            "layer_norm",
            (self.leaf(rows, width), weight, bias),
            lambda x, w, b: layer_norm_cuda(x, w, b, 1e-5, self.kernels),
            {
                **self.plain(lambda x, w, b: layer_norm_reference(x, w, b, 1e-5)),
                **_liger_and_apex("layer_norm"),
            },
            2 * self.bytes,
            3 * self.bytes,
        )
        yield RateTask(
            "rms_norm",
            (self.leaf(rows, width), weight),
            lambda x, w: rms_norm_cuda(x, w, 1e-5, self.kernels),
            {**self.plain(lambda x, w: rms_norm_reference(x, w, 1e-5)), **_liger_and_apex("rms_norm")},
            2 * self.bytes,
            3 * self.bytes,
        )

    def activations(self) -> Iterator[RateTask]:
        """What stands between the matrix products of an MLP."""
        rows, width = self.sizes.rows, self.sizes.width
        yield RateTask(
            "bias_gelu",
            (self.leaf(rows, width), self.leaf(width)),
            lambda x, b: bias_gelu_cuda(x, b, False, kernels=self.kernels),
            self.plain(lambda x, b: bias_gelu_reference(x, b, False)),
            2 * self.bytes,
            3 * self.bytes,
        )
        yield RateTask(
            "swiglu",
            (self.leaf(rows, 2, width),),
            lambda x: swiglu_cuda(x, self.kernels),
            self.plain(swiglu_reference),
            3 * self.bytes,
            5 * self.bytes,
        )

    def attention_parts(self) -> Iterator[RateTask]:
        """What stands around attention."""
        rows, width = self.sizes.rows, self.sizes.width
        keys = torch.arange(1, device=self.device)
        dropout = Dropout(0.1, keys, range(rows))
        yield RateTask(
            "bias_dropout_add",
            (self.leaf(rows, 1, width), self.leaf(width), self.leaf(rows, 1, width)),
            lambda x, b, r: bias_dropout_add_cuda(x, b, r, dropout, kernels=self.kernels),
            {"torch": lambda x, b, r: bias_dropout_add_reference(x, b, r, dropout)},
            3 * self.bytes,
            2 * self.bytes,
        )
        cos, sin = rotary_table(torch.arange(rows, device=self.device), 64, 1e4)
        yield RateTask(
            "rotary",
            (self.leaf(rows, 1, width // 64, 64),),
            lambda x: apply_rotary_cuda(x, cos, sin, self.kernels),
            self.plain(lambda x: apply_rotary_reference(x, cos, sin)),
            2 * self.bytes,
            2 * self.bytes,
        )
        queries = min(rows, width)
        heads = max(1, rows // queries)
        probabilities = heads * queries * width * self.dtype.itemsize
        yield RateTask(
            "scaled_softmax",
            (self.leaf(1, heads, queries, width),),
            lambda x: scaled_softmax_cuda(x, 0.125, False, None, self.kernels),
            self.plain(lambda x: scaled_softmax_reference(x, 0.125, False, None)),
            2 * probabilities,
            3 * probabilities,
        )

    def vocabulary(self) -> Iterator[RateTask]:
        """The loss and the embedding."""
        rows, width = self.sizes.rows, self.sizes.width
        tokens = max(8, rows * width // self.sizes.vocabulary)
        logits = tokens * self.sizes.vocabulary * self.dtype.itemsize
        target = torch.randint(self.sizes.vocabulary, (tokens,), device=self.device)
        whole = VocabularySlice(SoloGroup(), 0, self.sizes.vocabulary)
        cross_entropy = torch.nn.functional.cross_entropy
        yield RateTask(
            "cross_entropy",
            (self.leaf(tokens, self.sizes.vocabulary),),
            lambda x: vocab_parallel_cross_entropy_cuda(x, target, whole, kernels=self.kernels).loss,
            self.plain(lambda x: cross_entropy(x.float(), target, reduction="none")),
            logits,
            2 * logits,
        )
        ids = torch.randint(self.sizes.vocabulary, (rows,), device=self.device)
        yield RateTask(
            "embedding",
            (self.leaf(self.sizes.vocabulary, width),),
            lambda w: embedding_cuda(ids, w, 0, self.sizes.vocabulary, self.kernels),
            {"torch": lambda w: torch.nn.functional.embedding(ids, w)},
            2 * self.bytes,
            self.bytes + self.sizes.vocabulary * width * self.dtype.itemsize,
        )

    def state(self) -> Iterator[RateTask]:
        """What moves and updates state."""
        rows, width = self.sizes.rows, self.sizes.width
        how, flat = Quantization("int8", 256), self.leaf(rows, width).detach()
        yield RateTask(
            "quantize",
            (flat,),
            lambda x: quantize_cuda(x, how, kernels=self.kernels),
            {"torch": lambda x: quantize_reference(x, how)},
            self.bytes + rows * width,
        )
        yield RateTask(
            "square_sum",
            (flat,),
            lambda x: square_sum_cuda([x], kernels=self.kernels),
            {"torch": lambda x: x.float().square().sum(dtype=torch.float64)},
            self.bytes,
        )
        yield _adam(self.kernels, self.device, self.dtype, rows * width)


def _adam(kernels: KernelLibrary, device: str, dtype: torch.dtype, elements: int) -> RateTask:
    """fp32 masters and moments, the rest in dtype, beside torch's pass and the copies around it."""
    master, mean, square = (torch.rand(elements, device=device) for _ in range(3))
    grad, weights = (torch.randn(elements, device=device).to(dtype) for _ in range(2))
    rule, at = Adam(0.9, 0.95), StepFacts(3, 1e-3, 0.1)

    def ours(*_: Tensor) -> Tensor:
        state = [(mean, square)]
        update_cuda(UpdateCall(rule, at, [master], [grad], state, [weights]), kernels=kernels)
        return weights

    def fused(*_: Tensor) -> Tensor:
        own = {"lr": at.lr, **vars(rule), "weight_decay": at.weight_decay}
        step = torch.full((), 3.0, device=device)
        lists = [master], [grad.float()], [mean], [square], [], [step]
        torch._fused_adamw_(*lists, **own, amsgrad=False, maximize=False)
        return weights.copy_(master)

    return RateTask("adam", (master,), ours, {"torch": fused}, elements * (24 + 2 * dtype.itemsize))


def _liger_and_apex(name: str) -> dict[str, Callable[..., Tensor]]:
    """What is installed of these for a norm."""
    found: dict[str, Callable[..., Tensor]] = {}
    if importlib.util.find_spec("liger_kernel") is not None:
        module = importlib.import_module(f"liger_kernel.ops.{name}")
        if name == "rms_norm":
            found["liger"] = lambda x, w: module.LigerRMSNormFunction.apply(x, w, 1e-5)
        else:
            found["liger"] = lambda x, w, b: module.LigerLayerNormFunction.apply(x, w, b, 1e-5)
    # The package of that name on PyPI is another one.
    if name == "layer_norm" and importlib.util.find_spec("fused_layer_norm_cuda") is not None:
        apex = importlib.import_module("apex.normalization.fused_layer_norm")
        found["apex"] = lambda x, w, b: apex.fused_layer_norm_affine(x, w, b, x.shape[-1:], 1e-5)
    return found


def seconds_of(work: Callable[[], object], device: str, times: int) -> float:
    """The time of one call, over `times` of them."""
    if device == "cpu":
        began = time.perf_counter()
        for _ in range(times):
            work()
        return (time.perf_counter() - began) / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def passes_of(task: RateTask, call: Callable[..., Tensor]) -> dict[str, Callable[[], object]]:
    """The forward and, if there is one, the backward of a contender."""
    leaves = [each for each in task.inputs if each.requires_grad]
    passes: dict[str, Callable[[], object]] = {"forward": lambda: call(*task.inputs)}
    if task.backward and leaves:
        out = call(*task.inputs)
        grad = torch.randn_like(out)
        passes["backward"] = lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)
    return passes


def measure(task: RateTask, device: str, rounds: int, times: int) -> Iterator[dict[str, object]]:
    """Lines of one task: all contenders' passes and a copy of as many bytes, in turns."""
    work: dict[tuple[str, str], Callable[[], object]] = {}
    for contender, call in {"megazero": task.ours, **task.others}.items():
        try:
            for name, run in passes_of(task, call).items():
                run()
                work[contender, name] = run
        except Exception as error:  # a contender's failure is a result
            yield {"kernel": task.name, "contender": contender, "error": f"{type(error).__name__}: {error}"}
    source = torch.empty(max(task.forward, task.backward) // 2, dtype=torch.uint8, device=device)
    copied = torch.empty_like(source)
    work["copy", "copy"] = lambda: copied.copy_(source)
    found: dict[tuple[str, str], list[float]] = {key: [] for key in work}
    for _ in range(rounds):
        for key, run in work.items():
            found[key].append(seconds_of(run, device, times))
    medians = {key: statistics.median(values) for key, values in found.items()}
    rate = 2 * source.numel() / medians["copy", "copy"] / 1e9
    for (contender, name), seconds in medians.items():
        if contender == "copy":
            continue
        own = (task.forward if name == "forward" else task.backward) / seconds / 1e9
        line = {"kernel": task.name, "pass": name, "contender": contender, "us": seconds * 1e6}
        yield {**line, "gb_per_s": own, "copy_gb_per_s": rate, "share_of_copy": own / rate}


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    device: str
    rounds: int


def line_of(row: str, asked: Asked) -> Line:
    """Work out one row, such as ``bf16 adam``; its lines are those of all passes and contenders."""
    dtype, name = row.split()
    tiny = asked.device == "cpu"
    kernels = WatchedLibrary(build(on_cpu_recipe())) if tiny else cuda_kernels()
    sizes = Sizes(8, 64, 40) if tiny else Sizes(16384, 4096, 131072)
    task = TaskMaker(kernels, asked.device, DTYPES[dtype], sizes).task(name)
    return {"lines": list(measure(task, asked.device, 1 if tiny else asked.rounds, 1 if tiny else 20))}


def main() -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of operators' names")
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=["bf16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600, help="the time for all rows")
    parser.add_argument("--output", type=Path, help="also append the lines to this file")
    flags = parser.parse_args()
    if flags.device == "cuda" and not cuda_built():
        print(
            "error: the CUDA kernels must be built and a device be there; see `megazero env`.",
            file=sys.stderr,
        )
        return 1
    wanted = [
        name for names in KERNELS.values() for name in names if any(part in name for part in flags.only)
    ]
    rows = {f"{dtype} {name}": ROW_SECONDS for dtype in flags.dtypes for name in wanted}
    asked, failed = Asked(flags.device, flags.rounds), False
    for row, made in run_rows(partial(line_of, asked=asked), rows, flags.seconds):
        dtype, name = row.split()
        failed |= "failed" in made
        for line in made.get("lines", [{"kernel": name, **made}]):
            full = {**line, "dtype": dtype, "device": flags.device}
            failed |= line.get("contender") == "megazero" and "error" in line
            print(json.dumps(full), flush=True)
            if flags.output is not None:
                with open(flags.output, "a", encoding="utf-8") as file:
                    file.write(json.dumps(full) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
