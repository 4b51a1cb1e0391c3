"""How many kernels a step launches on a GPU, and the host's time for it; counted where there is no GPU.

    python benchmarks/launches.py

Operators take the implementations that they have for a GPU, and our kernels run on the CPU. A launch is a
launch of ours, or an operator of torch that would start one on a GPU: views, and tensors that nobody has
filled, start none. Attention stands in for one launch each way, whatever computes it. What a layer costs is
the difference between models that differ in their number of layers. One JSON line for each case:

- `forward`, `backward`: launches of a layer in a micro-batch, the taking over of its gradients included;
- `step`: launches that a micro-batch makes however many layers there are;
- `waits`: how often the host waits for the device in a step;
- `host_us`: microseconds of the host for a layer and micro-batch with kernels that do nothing, on tiny
  tensors, and `no_op_us`, those of one launch of such a kernel.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.contenders import Shape
from benchmarks.contenders.ours import make_config, vocabulary_of
from megazero.config.steps import Progress
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.parallel import ParallelConfig
from megazero.config.tree.zero import ZeroConfig
from megazero.kernels.build import build, on_cpu_recipe
from megazero.kernels.library import KernelLibrary
from megazero.kernels.on_cpu import WatchedLibrary
from megazero.models.batch import Batch, Places
from megazero.models.targets import Targets
from megazero.mpu.context import solo_context
from megazero.mpu.host_waits import HostWaits
from megazero.mpu.rng import sample_keys
from megazero.ops import cuda
from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.train.build import build_engine
from megazero.train.parts.chunks import build_chunks
from megazero.train.step.timers import Timers
from megazero.zero.optimizer import Optimizer

# Operators that start nothing: they allocate, or only look at a tensor in another way.
_FREE = frozenset(
    {
        "detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
        "_reshape_alias", "lift_fresh", "set_", "resize_", "_local_scalar_dense", "record_stream",
    }
)  # fmt: skip
SMALL = Shape(layers=1, hidden=64, heads=2, sequence=8, vocab=128, micro_batch=2)
NO_OP = "megazero_cuda_driver_error"  # of a library for the CPU: returns 0


class TorchLaunches(TorchDispatchMode):
    """Counts the operators of torch that would each launch a kernel, in `forward` and in `backward`."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()

    @property
    def now(self) -> Counter[str]:
        """The counts of what runs now: within autograd it is `backward`."""
        return self.backward if torch._C._current_graph_task_id() >= 0 else self.forward

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        # Where kernels run, autograd knows no other thread than this one.
        if not operator.is_view and name not in _FREE:
            self.now[name] += 1
        return operator(*args, **(kwargs or {}))


class CountedLibrary(WatchedLibrary):
    """Kernels on the CPU whose launches `launches` counts too."""

    def __init__(self, path: Path, launches: TorchLaunches) -> None:
        super().__init__(path)
        self._launches = launches

    def launch(self, name: str, *arguments) -> None:
        self.reset()
        super().launch(name, *arguments)
        for kernel, counts in self.report().kernels.items():
            self._launches.now[kernel] += counts.launches


class IdleLibrary(WatchedLibrary):
    """Kernels that do nothing, so that what remains is the way to them."""

    launch = KernelLibrary.launch

    def _function(self, name: str):
        real = super()._function(name)
        if name.startswith("column_"):
            return real
        idle = ctypes.CFUNCTYPE(ctypes.c_int, *real.argtypes)((NO_OP, self._library))
        idle.argtypes = real.argtypes
        self._functions[name] = idle
        return idle


class StandIn(torch.autograd.Function):
    """Attention as one launch each way."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.shape = q.shape
        return q.neg().flatten(2)

    @staticmethod
    def backward(ctx, grad):
        grads = grad.neg().view(ctx.shape)
        return grads, grads, grads


@dataclass(frozen=True)
class Case:
    """A training step.

    Attributes:
        dtype: ``bf16`` or ``fp32``.
        dropout: the share of hidden states that is dropped.
        micro_batches: the number of micro-batches in a step.
        shape: the model.
    """

    dtype: str = "bf16"
    dropout: float = 0.0
    micro_batches: int = 1
    shape: Shape = field(default_factory=lambda: SMALL)


class Step:
    """A step of `case` with a number of layers; `libraries` is what the kernels are called through."""

    def __init__(self, case: Case, layers: int):
        shape = replace(
            case.shape, layers=layers, dtype=case.dtype, accumulations=case.micro_batches, device="cpu"
        )
        config = make_config(shape, 1, ParallelConfig(device="cpu"), ZeroConfig())
        model = config.model.model_copy(update={"hidden_dropout": case.dropout})
        config = config.model_copy(update={"model": model})
        context = solo_context(torch.device("cpu"))
        chunks = build_chunks(config, vocabulary_of(shape), context)
        for chunk in chunks.values():
            for module in chunk.modules():
                if hasattr(module, "core"):
                    module.core = lambda q, k, v, *_: StandIn.apply(q, k, v)
        self.engine = build_engine(config, training_plan_of(config, 1), chunks, context)
        keys = torch.from_numpy(sample_keys(1, range(shape.micro_batch)))
        keys = keys if case.dropout else None
        self.batches = [
            Batch(tokens, Targets(labels), places=Places(sample_keys=keys))
            for tokens, labels in shape.batches(0)
        ]
        self.timers = Timers()

    def __call__(self) -> None:
        self.engine.train_step(self.batches, Progress(), self.timers)


@contextmanager
def as_on_cuda(library: KernelLibrary) -> Iterator[None]:
    """Operators take the implementations that they have for a GPU, and kernels are those of `library`."""
    choose = Operator.choose

    def of(cls: type[CallFacts], tensor: torch.Tensor, **own) -> CallFacts:
        return cls("cuda", tensor.dtype, **own)

    def on_cuda(self: Operator, facts: CallFacts) -> Implementation:
        return choose(self, facts if facts.device == "cuda" else replace(facts, device="cuda"))

    with ExitStack() as stack:
        stack.enter_context(patch.dict(cuda._BACKEND.__dict__, library=library))
        stack.enter_context(patch.object(CallFacts, "of", classmethod(of)))  # most calls; no time for a copy
        stack.enter_context(patch.object(Operator, "choose", on_cuda))
        yield


def launches(case: Case, layers: int) -> tuple[Counter[str], Counter[str]]:
    """The launches of a step's passes, forward and backward, over all its micro-batches."""
    counts = TorchLaunches()
    with as_on_cuda(CountedLibrary(build(on_cpu_recipe()), counts)):
        step = Step(case, layers)
        train = step.engine.executor.train

        def counted(*args):
            with counts:
                return train(*args)

        step.engine.executor.train = counted
        step()
    return counts.forward, counts.backward


def per_layer(case: Case) -> tuple[Counter[str], Counter[str], int]:
    """The launches of a layer in a micro-batch, forward and backward; and all others of a micro-batch."""
    few, more = launches(case, 1), launches(case, 2)
    forward, backward = (
        Counter({name: (b[name] - a[name]) / case.micro_batches for name in b if b[name] != a[name]})
        for a, b in zip(few, more, strict=True)
    )
    own = forward.total() + backward.total()
    return forward, backward, round((few[0].total() + few[1].total()) / case.micro_batches - own)


def waits(case: Case) -> int:
    """How often the host waits for the device in a step, but for what a GPU does another way."""
    with as_on_cuda(WatchedLibrary(build(on_cpu_recipe()))):
        step = Step(case, 1)
        step()
        with HostWaits() as seen:
            step()
    return sum(n for (_, what), n in seen.found.items() if what != "copies host data")


def host_seconds(case: Case, rounds: int = 30) -> tuple[float, float]:
    """Seconds of the host for a layer and micro-batch, and for one launch of a kernel that does nothing."""
    library = IdleLibrary(build(on_cpu_recipe()))
    case = replace(case, shape=Shape(layers=1, hidden=8, heads=2, sequence=2, vocab=8, micro_batch=1))
    # Kernels that do nothing leave whatever was in memory: no time for looking where it is not finite.
    with as_on_cuda(library), patch.object(Optimizer, "_first_bad_parameter", lambda self: ""):
        steps = {layers: Step(case, layers) for layers in (2, 10)}
        times: dict[int, list[float]] = {layers: [] for layers in steps}
        for _ in range(rounds):
            for layers, step in steps.items():
                began = time.thread_time()
                step()
                times[layers].append(time.thread_time() - began)
    fastest = {layers: min(seconds[3:]) for layers, seconds in times.items()}
    return (fastest[10] - fastest[2]) / 8 / case.micro_batches, no_op_seconds(library)


def no_op_seconds(library: KernelLibrary) -> float:
    """Seconds of one launch with nine arguments, three of them tensors."""
    x, bias = torch.ones(4, 8), torch.ones(8)
    arguments = (x.dtype, 0, 4, 8, x, bias, x, 0, None)
    times = []
    for _ in range(20):
        began = time.thread_time()
        for _ in range(100):
            library.launch("bias_gelu_forward", *arguments)
        times.append((time.thread_time() - began) / 100)
    return statistics.median(times)


CASES = [
    Case(dtype, dropout, micro_batches)
    for dtype in ("bf16", "fp32")
    for dropout in (0.0, 0.1)
    for micro_batches in (1, 2)
]


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    for case in CASES:
        forward, backward, step = per_layer(case)
        host, no_op = host_seconds(case)
        line = {
            "dtype": case.dtype,
            "dropout": case.dropout,
            "micro_batches": case.micro_batches,
            "forward": forward.total(),
            "backward": backward.total(),
            "step": step,
            "waits": waits(case),
            "host_us": round(1e6 * host),
            "no_op_us": round(1e6 * no_op, 1),
            "kernels": {"forward": dict(forward.most_common()), "backward": dict(backward.most_common())},
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
