"""A GPU computes what a CPU does, and each feature of a run leaves its numbers as they are.

    python proofs/device_agrees.py --output gpu_agrees.jsonl     # on a GPU, in a few minutes
    python proofs/device_agrees.py --dry-run                     # the same rows on the CPU, small
    python proofs/device_agrees.py --list
    python proofs/device_agrees.py --only graphs "fp32 experts"  # rows whose names contain one of these

A row trains a small model twice and compares. Where both trainings must do the same arithmetic they are
compared bit for bit, under deterministic algorithms; elsewhere within a bound, whose reason stands beside it.
Losses, gradient norms, all gradients and all weights are compared after each step. `used` is the share of
the bound that the worst of them takes. The exit status is 1 if a row is above its bound, fails, or does not
end in time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.rows import Line, run_rows
from megazero.checkpoint.folder import iteration_folder
from megazero.config.resolve import parse_config
from megazero.config.steps import Step
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.config import Config
from megazero.layers.graphed import graph_layers
from megazero.models.batch import MicroBatch
from megazero.mpu.context import solo_context
from megazero.mpu.cpu_cores import usable_cores
from megazero.mpu.launch import Launch, choose_device
from megazero.ops import native
from megazero.ops.attention import Documents
from megazero.ops.counter_random import keep_mask, normal
from megazero.train.pretraining import pretrain
from megazero.train.process import choose_products, compute_deterministically
from megazero.verify.record import Record, micro_batches, record_steps, verification_engine
from proofs.device_uses import use_checks
from proofs.verdicts import (
    BF16_CURVE,
    CHOSEN_CURVE,
    FP8_CURVE,
    FP32_CURVE,
    Verdict,
    bits,
    curve,
    near,
    same_tensors,
)
from tests.layers.pooled_graphs import PooledGraphs
from tests.layouts.layout import EXPERTS, METHODS, Layout

ROW_SECONDS = 60.0
SLOWNESS = 8
"""A dry run's rows may take so many times as long: machines without a GPU are busy with other things."""
WIDE = {
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "seq_length": 64,
    "vocab_size": 509,
    "num_attention_heads": 4,
}


@dataclass(frozen=True)
class Side:
    """One of the two trainings of a row.

    Attributes:
        layout: the model and how it is trained.
        on_cpu: whether it trains on the CPU wherever the other does.
        sections: further settings, by section of the configuration.
        documents: whether sequences hold three documents each.
        graphs: whether layers are CUDA graphs.
        steps: how many steps.
    """

    layout: Layout
    on_cpu: bool = False
    sections: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    documents: bool = False
    graphs: bool = False
    steps: int = 5


@dataclass(frozen=True)
class Bench:
    """Where rows train: on `device`, with wide models or small ones.

    `spoil` raises the learning rate of the second side by that share, and from 1 on changes its seed. Then no
    row may agree.
    """

    device: str
    wide: bool
    spoil: float = 0.0

    def config(self, side: Side, *, second: bool) -> Config:
        """The configuration of a side."""
        config = side.layout.config(side.steps)
        changes = {name: dict(values) for name, values in side.sections.items()}
        device = "cpu" if side.on_cpu else self.device
        changes["parallel"] = {"device": device, **changes.get("parallel", {})}
        if self.wide:
            groups = {"num_query_groups": 2} if config.model.num_query_groups else {}
            changes["model"] = {**WIDE, **groups, **changes.get("model", {})}
            changes["zero"] = {"bucket_size": 300_000, "prefetch_size": 600_000, **changes.get("zero", {})}
        if side.graphs and device == "cuda":
            changes["acceleration"] = {"cuda_graph": True}
        if self.spoil and second:
            lr = changes.get("optimizer", {}).get("lr", config.optimizer.lr)
            changes["optimizer"] = {"lr": lr * (1 + self.spoil)}
            changes["training"] = {"seed": config.training.seed + int(self.spoil)}
        made = {}
        for name, values in changes.items():
            section = getattr(config, name)
            made[name] = type(section)(**{**section.model_dump(exclude_unset=True), **values})
        return config.model_copy(update=made)

    def train(self, side: Side, *, second: bool) -> Record:
        """Train a side; everything that it recorded is on the CPU then."""
        config = self.config(side, second=second)
        device = choose_device(config.parallel.device, local_rank=0)
        plan, context = training_plan_of(config, 1), solo_context(device)
        engine = verification_engine(config, plan, context)
        if side.graphs and device.type == "cpu":
            for chunk in engine.executor.chunks.values():
                graph_layers(chunk.blocks(), PooledGraphs(), warm_calls=1)

        def batches(step: Step) -> list[MicroBatch]:
            made = micro_batches(config, context, step)
            return [_in_documents(batch) for batch in made] if side.documents else made

        return _on_host(record_steps(engine, plan, side.steps, batches))

    def flags(self, *, second: bool) -> list[str]:
        """Those of a run of `pretrain_gpt.py`."""
        size = (4, 256, 4, 64) if self.wide else (2, 32, 4, 16)
        names = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length")
        shape = [str(word) for pair in zip(names, size, strict=True) for word in pair]
        spoilt = self.spoil if second else 0.0
        fixed = (
            "--vocab-size 512 --mock-data --micro-batch-size 2 --global-batch-size 4 --eval-iters 0 --bf16"
        )
        more = f"--train-iters 6 --save-interval 2 --deterministic-mode --device {self.device}"
        return [*shape, *fixed.split(), *more.split(), "--lr", str(1e-3 * (1 + spoilt))]


def _in_documents(batch: MicroBatch) -> MicroBatch:
    b, s = batch.tokens.shape
    ends = torch.arange(s) * 3 // s + torch.arange(b).unsqueeze(1)
    documents = Documents(ends.int().to(batch.tokens.device))
    return replace(batch, places=replace(batch.places, documents=documents))


def _on_host(record: Record) -> Record:
    gradients, weights = (
        [{name: tensor.cpu() for name, tensor in step.items()} for step in steps]
        for steps in (record.gradients, record.weights)
    )
    return replace(record, gradients=gradients, weights=weights)


Check = Callable[[Bench], Verdict]


def compared(bench: Bench, first: Side, second: Side, judge: Callable[[Record, Record], Verdict]) -> Verdict:
    """Train both sides and judge them. Where bits count, by kernels that give the same ones each time.

    Elsewhere by those of any run, which differ: cuDNN's attention is not among the former.
    """
    if judge is bits:
        compute_deterministically()
    return judge(bench.train(first, second=False), bench.train(second, second=True))


def graphs(bench: Bench, layout: Layout) -> Verdict:
    """Layers as graphs against layers as launches; on a CPU a stand-in records torch's operators."""
    stands_in = (
        patch.dict(vars(native._BACKEND), built=False) if bench.device == "cpu" else contextlib.nullcontext()
    )
    with stands_in:
        return compared(bench, Side(layout, graphs=True), Side(layout), bits)


def masks(bench: Bench) -> Verdict:
    """Dropout's masks, which are integers on every device."""
    made = []
    for device, moved in ((bench.device, 0), ("cpu", int(bench.spoil > 0))):
        keys = (torch.arange(1 << 10) * 0x9E3779B97F4A7 - moved).unsqueeze(1).to(device)
        made.append(
            {f"p={p}": keep_mask(keys, p, torch.arange(777, device=device)).cpu() for p in (0.1, 0.5)}
        )
    return same_tensors(*made)


def initial_weights(bench: Bench) -> Verdict:
    """Weights in fp64, so that the last bits of erfinv show; rounded to fp32 hardly one differs."""
    shape = (4099, 4097) if bench.wide else (67, 65)
    one, other = (
        normal(key, shape, 0.02, torch.float64, device).cpu()
        for key, device in ((3, bench.device), (3 + int(bench.spoil > 0), "cpu"))
    )
    return Verdict(((one - other).abs() / (1e-12 * 0.02 + 1e-12 * other.abs())).max().item(), "a weight")


def run(flags: list[str], folder: Path) -> dict[str, Tensor]:
    """All tensors of the checkpoints of a run that saves there."""
    argv = [*flags, "--save", str(folder)]
    with contextlib.redirect_stdout(io.StringIO()):
        pretrain(parse_config(argv, world_size=1).config, Launch())
    tensors = {}
    for iteration in (2, 4, 6):
        for path in sorted(iteration_folder(folder, iteration).glob("*.safetensors")):
            tensors |= {f"{iteration}/{path.stem}/{name}": x for name, x in load_file(path).items()}
    return tensors


def saving(bench: Bench) -> Verdict:
    """Checkpoints written while training goes on, against those that it waits for."""
    with tempfile.TemporaryDirectory() as folder:
        first = run([*bench.flags(second=False), "--async-save"], Path(folder, "a"))
        second = run(bench.flags(second=True), Path(folder, "b"))
    return same_tensors(first, second)


def resuming(bench: Bench, more: tuple[str, ...] = ()) -> Verdict:
    """A run that is stopped and goes on, against one that is not."""
    with tempfile.TemporaryDirectory() as folder:
        halves = [*bench.flags(second=False), *more, "--load", str(Path(folder, "a"))]
        with contextlib.redirect_stdout(io.StringIO()):
            argv = [*halves, "--save", str(Path(folder, "a")), "--exit-interval", "4"]
            pretrain(parse_config(argv, world_size=1).config, Launch())
        first = run(halves, Path(folder, "a"))
        second = run([*bench.flags(second=True), *more], Path(folder, "b"))
    return same_tensors(first, second)


GPT, LLAMA = Layout(dropout=0.1, micro_batch=2), Layout(shape="llama", micro_batch=2)
BERT = Layout(shape="bert", micro_batch=2, dropout=0.1)
HYBRID = Layout(letters="M-*", layers=3, micro_batch=2)
HOST = Layout(store="cpu", micro_batch=2, zero=1)
DELAYED = {"offload": {"optimizer": "cpu", "delayed_param_update": True, "delayed_param_update_start": 1}}


def on_cpu(layout: Layout, judge: Callable[[Record, Record], Verdict] = near, **more: object) -> Check:
    """The device against the CPU."""
    first = Side(layout, **more)
    return partial(compared, first=first, second=replace(first, on_cpu=True), judge=judge)


def feature(plain: Layout, judge: Callable[[Record, Record], Verdict] = bits, **changes: object) -> Check:
    """A layout with some changes against the layout without them, both on the device."""
    return partial(compared, first=Side(replace(plain, **changes)), second=Side(plain), judge=judge)


def curves(bench: Bench, first: Side, second: Side, bound: float) -> Verdict:
    """Loss curves over 20 steps, at a rate at which roundings do not add up."""
    calm = {"optimizer": {"lr": 1e-3}}
    sides = [replace(side, steps=20, sections=calm) for side in (first, second)]
    return compared(bench, *sides, partial(curve, bound=bound))


def curves_on_cpu(layout: Layout, bound: float) -> Check:
    """The device's loss curve against the CPU's."""
    return partial(curves, first=Side(layout), second=Side(layout, on_cpu=True), bound=bound)


def checks(backend: str) -> Iterator[tuple[str, Check]]:
    """All rows by name, the most important first."""
    yield "fp32 gpt with dropout", on_cpu(GPT)
    yield "fp32 gpt with GQA and rotary", on_cpu(LLAMA)
    yield "fp32 gpt with documents", on_cpu(LLAMA, documents=True)
    yield "fp32 bert", on_cpu(BERT)
    yield "fp32 bert packed", on_cpu(replace(BERT, packed=True))
    yield "dropout masks", masks
    yield "initial weights", initial_weights
    for experts in filter(None, EXPERTS):
        yield f"fp32 experts {experts}", on_cpu(Layout(experts=experts, layers=4, micro_batch=2))
    yield "fp32 experts top2 gathered", on_cpu(Layout(experts="top2", dispatcher="allgather", micro_batch=2))
    yield "fp32 hybrid", on_cpu(HYBRID)
    yield "hybrid twice the same", feature(replace(HYBRID, dtype="bf16"))
    for stage in (1, 2, 3):
        yield f"zero {stage} = 0", feature(GPT, zero=stage)
    yield "zero 3 = 0, bf16", feature(replace(LLAMA, dtype="bf16"), zero=3)
    yield "zero 2 = 0, experts", feature(Layout(experts="top2", micro_batch=2), zero=2)
    yield "twice the same", feature(replace(GPT, dtype="bf16"))
    for granularity in ("full", "selective"):
        yield f"recompute {granularity} = none", feature(GPT, recompute=granularity)
    yield "recompute full = none, bf16", feature(replace(LLAMA, dtype="bf16"), recompute="full")
    yield "graphs = launches", partial(graphs, layout=replace(GPT, layers=3))
    yield "graphs = launches, bf16", partial(graphs, layout=replace(LLAMA, layers=3, dtype="bf16", zero=2))
    yield "graphs = launches, fp8", partial(graphs, layout=replace(GPT, layers=3, fp8="delayed"))
    yield "offload to disk = to host", feature(HOST, store="nvme")
    # Masters are updated by the host's kernels, which contract products and sums in their own way.
    yield "offload to host near none", feature(replace(HOST, store=""), near, store="cpu")
    yield "offload of weights near none", feature(Layout(zero=3, micro_batch=2), near, store="cpu")
    yield "fp32 delayed updates", on_cpu(Layout(micro_batch=2, zero=1), sections=DELAYED)
    for method in filter(None, METHODS):
        yield f"fp32 {method}", on_cpu(Layout(layers=4, method=method, micro_batch=2))
    for optimizer in ("sgd", "adagrad", "lamb", "muon"):
        yield f"fp32 {optimizer}", on_cpu(Layout(optimizer=optimizer, micro_batch=2))
    # Its steps are signs, also of the key bias's gradient, which is noise and does not reach the loss.
    yield "fp32 lion", on_cpu(Layout(optimizer="lion", micro_batch=2), partial(curve, bound=FP32_CURVE))
    yield "saved beside training = saved", saving
    yield "resumed = straight", resuming
    yield "resumed = straight, fp8", partial(resuming, more=("--fp8-format", "hybrid"))
    for name, layout, bound in (
        ("gpt", GPT, BF16_CURVE),
        ("llama", LLAMA, BF16_CURVE),
        ("experts", Layout(experts="shared", micro_batch=2), CHOSEN_CURVE),
        ("bert", replace(BERT, packed=True), CHOSEN_CURVE),
    ):
        yield f"bf16 curve {name}", curves_on_cpu(replace(layout, dtype="bf16"), bound)
    plain = replace(LLAMA, dtype="bf16")
    for recipe in ("tensorwise", "delayed"):
        eight = replace(plain, fp8=recipe)
        yield (
            f"fp8 curve {recipe} near bf16",
            partial(curves, first=Side(eight), second=Side(plain), bound=FP8_CURVE),
        )
        yield f"fp8 curve {recipe} on CPU", curves_on_cpu(eight, FP8_CURVE)
    yield from use_checks()
    yield "compiled near eager", feature(GPT, near, compiled=backend)
    yield "compiled near eager, llama", feature(LLAMA, near, compiled=backend)


def line_of(name: str, bench: Bench) -> Line:
    """Work out one row."""
    check = dict(checks("inductor" if bench.wide else "aot_eager"))[name]
    torch.use_deterministic_algorithms(False)  # which a row before may have asked for
    choose_products(tf32=False)
    torch.set_num_threads(max(1, usable_cores() // 4))
    verdict = check(bench)
    return {"used": verdict.used, "where": verdict.where}


def main() -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="small models, both sides on the CPU")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of rows' names")
    parser.add_argument("--list", action="store_true", help="print the rows' names")
    parser.add_argument("--seconds", type=float, default=420, help="begin no further row after so long")
    parser.add_argument("--workers", type=int, default=4, help="rows that are worked out at a time")
    parser.add_argument("--output", type=Path, help="append the lines to this file too")
    args = parser.parse_args()
    names = [name for name, _ in checks("inductor") if any(part in name for part in args.only)]
    if args.list:
        print(*names, sep="\n")
        return 0
    bench = Bench("cpu" if args.dry_run else "cuda", wide=not args.dry_run)
    bad = 0
    rows = dict.fromkeys(names, ROW_SECONDS * (SLOWNESS if args.dry_run else 1))
    for name, line in run_rows(partial(line_of, bench=bench), rows, args.seconds, args.workers):
        good = line.get("used", float("inf")) <= 1
        bad += not good
        text = (
            line.get("failed") or line.get("left_out") or f"{line['used']:.2g} of its bound: {line['where']}"
        )
        print(f"{'ok ' if good else 'BAD'} {name:32} {text}", flush=True)
        if args.output is not None:
            with args.output.open("a", encoding="utf-8") as file:
                if not math.isfinite(line.get("used", 0.0)):
                    line["used"] = None  # JSON has no such number
                file.write(json.dumps({"row": name, "device": bench.device, "good": good, **line}) + "\n")
    print(f"{len(names) - bad} of {len(names)} rows agree")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
