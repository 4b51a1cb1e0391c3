"""The update of state on the host: its rate beside memcpy's, torch's fused AdamW and DeepSpeed's.

    python benchmarks/host_update.py                      # 1 and 2 threads
    python benchmarks/host_update.py --threads 1 --rounds 25

Three cases of AdamW with fp32 masters and moments: `fp32` (fp32 gradients, which are the model's dtype, so
that masters are the weights), `clipped` (the same, and gradients are multiplied by a factor), and `bf16`
(bf16 gradients and weights, and a factor). The contenders do what is around their kernel in the trainers
that they come from: `torch` what megazero did before it had a kernel, `deepspeed` what its ZeRO-Offload does.

The bytes are those that must move, whoever moves more: 16 read and 12 written per element in fp32, 14 and 14
in bf16. `copy` is memcpy between buffers much larger than the caches, 4 bytes read and 4 written per element;
where memcpy stores through the cache, the lines that it overwrites are read too, which would be 12 bytes
instead of 8. The share of the copy rate is given by both counts, `share` and `share_allocating`.

Rounds are interleaved; rates are medians, by clock and by processor time per thread, which other jobs on the
machine disturb less. JSON lines.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # a thread that waits must not count as work

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.ops.update import StepFacts, UpdateCall, adam_fused, update_step
from megazero.optim.elementwise import Adam

RULE, LR, DECAY = Adam(), 1e-3, 0.1
FACTOR = 0.5
BYTES = {"copy": 8, "fp32": 28, "clipped": 28, "bf16": 28}


class HostState:
    """Masters, moments, gradients and weights of so many elements, as the trainers keep them."""

    def __init__(self, count: int):
        generator = torch.Generator().manual_seed(0)
        self.master, self.grad, self.m = (torch.randn(count, generator=generator) for _ in range(3))
        self.v = torch.rand(count, generator=generator)
        self.narrow_grad, self.weights = self.grad.bfloat16(), self.master.bfloat16()
        self.wide_grad = torch.empty_like(self.grad)
        self.step = 0

    @property
    def state(self) -> list[tuple[Tensor, Tensor]]:
        """The moments, as an update takes them."""
        return [(self.m, self.v)]


def ours(state: HostState, case: str) -> None:
    """One pass."""
    narrow = case == "bf16"
    grad = [state.narrow_grad if narrow else state.grad]
    out, scale = [state.weights if narrow else None], 1.0 if case == "fp32" else FACTOR
    at = StepFacts(state.step, LR, DECAY)
    update_step(UpdateCall(RULE, at, [state.master], grad, state.state, out, scale))


def by_torch(state: HostState, case: str) -> None:
    """torch's fused AdamW, with the passes around it that megazero made before."""
    grad = state.grad
    if case == "bf16":
        grad = state.narrow_grad.to(torch.float32, copy=True).mul_(FACTOR)
    elif case == "clipped":
        grad.mul_(FACTOR)
    at = StepFacts(state.step, LR, DECAY)
    adam_fused(UpdateCall(RULE, at, [state.master], [grad], state.state, [None]))
    if case == "bf16":
        state.narrow_grad.copy_(grad)
        state.weights.copy_(state.master)


def by_deepspeed() -> Callable[[HostState, str], None]:
    """DeepSpeed's CPU Adam, with the passes around it of its ZeRO-Offload; compiles at the first call.

    Raises:
        Exception: it is not there, or does not compile.
    """
    from deepspeed.ops.op_builder import CPUAdamBuilder

    kernel = CPUAdamBuilder().load()
    kernel.create_adam(0, 1e-3, 0.9, 0.999, 1e-8, 0.1, True, False)

    def update(state: HostState, case: str) -> None:
        grad = state.grad
        if case == "bf16":
            grad = state.wide_grad.copy_(state.narrow_grad)
        if case != "fp32":
            grad.mul_(FACTOR)
        facts = (0, state.step, 1e-3, 0.9, 0.999, 1e-8, 0.1, True)
        kernel.adam_update(*facts, state.master, grad, state.m, state.v)
        if case == "bf16":
            state.weights.copy_(state.master)

    return update


class Copier:
    """memcpy by so many threads, each of its own part."""

    def __init__(self, state: HostState, threads: int):
        from concurrent.futures import ThreadPoolExecutor

        self.pool = ThreadPoolExecutor(threads)
        size = 4 * state.grad.numel() // threads
        target, source = state.wide_grad.data_ptr(), state.grad.data_ptr()
        self.parts = [(target + k * size, source + k * size, size) for k in range(threads)]

    def __call__(self) -> None:
        for done in [self.pool.submit(ctypes.memmove, *part) for part in self.parts]:
            done.result()


def measure(threads: int, rounds: int, count: int, others: dict[str, Callable]) -> None:
    """All contenders in all cases, in turns."""
    torch.set_num_threads(threads)
    state = HostState(count)
    ways: dict[tuple[str, str], Callable[[], None]] = {("copy", "memcpy"): Copier(state, threads)}
    for case in ("fp32", "clipped", "bf16"):
        for name, update in {"megazero": ours, "torch": by_torch, **others}.items():
            ways[case, name] = lambda update=update, case=case: update(state, case)
    found: dict[tuple[str, str], list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, run in ways.items():
            state.step += 1
            clock, used = time.perf_counter(), time.process_time()
            run()
            seconds = time.perf_counter() - clock, (time.process_time() - used) / threads
            if number:  # the first round warms up
                found[way].append(seconds)
    rates = {
        (case, name): [
            BYTES[case] * count / 1e9 / statistics.median(each) for each in zip(*seconds, strict=True)
        ]
        for (case, name), seconds in found.items()
    }
    copy = rates["copy", "memcpy"]
    for (case, name), rate in rates.items():
        best = rates.get((case, "megazero"), rate)
        shares = [mine / theirs for mine, theirs in zip(rate, copy, strict=True)]
        tell(
            case=case,
            contender=name,
            threads=threads,
            elements=count,
            rounds=rounds,
            gb_s=rate,
            share=shares,
            share_allocating=[share * 8 / 12 for share in shares],
            megazero_over_it=[mine / theirs for mine, theirs in zip(best, rate, strict=True)],
        )


def tell(**found: object) -> None:
    """Print a line of JSON; pairs are by clock and by processor time."""
    shown = {
        key: [float(f"{each:.3g}") for each in value] if isinstance(value, list) else value
        for key, value in found.items()
    }
    print(json.dumps({"benchmark": "host_update", **shown}), flush=True)


def main() -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--elements", type=int, default=1 << 24)
    flags = parser.parse_args()
    others = {}
    try:
        others["deepspeed"] = by_deepspeed()
    except Exception as error:
        print(f"without DeepSpeed: {type(error).__name__}: {error}", file=sys.stderr)
    for threads in flags.threads:
        measure(threads, flags.rounds, flags.elements, others)
    return 0


if __name__ == "__main__":
    sys.exit(main())
