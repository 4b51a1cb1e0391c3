"""Measure a machine for a `Device`: matrix products, attention, copies, and calls between ranks.

All ranks measure at the same time, so that they share cores, memory and links as in a training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megazero.mpu.group import Group, Transfer
from megazero.mpu.torch_group import open_group
from megazero.ops.attention import attention
from megazero.plan.hardware import MIB

Work = Callable[[], object]
MeasuredRow = tuple[str, str, str]

_ROUNDS = 20
_ROUND_SECONDS = 0.005
_CALLS = 8  # of a round that alternates calls and matrix products
_PATIENCE = timedelta(minutes=5)
_ALPHA_BYTES = 64
_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class MeasuredSizes:
    """The sizes that are measured on a kind of device.

    Attributes:
        products: (m, n, k) of matrix products.
        dtypes: dtypes of matrix products; of attention, the first two.
        attention: (sequence length, heads, head width).
        copied_mib: size of a copy in memory.
        payloads_mib: sizes of calls between ranks.
    """

    products: tuple[tuple[int, int, int], ...]
    dtypes: tuple[torch.dtype, ...]
    attention: tuple[int, int, int]
    copied_mib: int
    payloads_mib: tuple[float, ...]

    @classmethod
    def of(cls, device: torch.device) -> MeasuredSizes:
        """The sizes for a kind of device, with products of up to some milliseconds."""
        if device.type == "cuda":
            squares = tuple((m, n, n) for m in (128, 1024, 4096, 8192) for n in (1024, 2048, 4096, 8192))
            products = (*squares, (8192, 4096, 512), (8192, 512, 4096))
            dtypes = (torch.bfloat16, torch.float16, torch.float32)
            return cls(products, dtypes, (4096, 16, 128), 1024, (1, 8, 64, 512))
        squares = tuple((m, n, n) for m in (64, 256, 1024) for n in (128, 256, 512, 1024))
        products = (*squares, (1024, 1024, 64), (1024, 64, 1024))
        return cls(products, (torch.float32, torch.bfloat16), (512, 4, 64), 64, (0.0625, 1, 16))


@dataclass
class MachineMeasurements:
    """Parts of a device's document, and `lines` (what, size, rate) for people."""

    compute: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, object] = field(default_factory=dict)
    inside_node: dict[str, object] = field(default_factory=dict)
    lines: list[MeasuredRow] = field(default_factory=list)


class RankClock:
    """Times work on all ranks at once, in rounds; the slowest rank's time counts."""

    def __init__(self, world: Group, device: torch.device):
        self.world, self.device = world, device

    def seconds(self, work: Work, group: Group | None = None, count: int | None = None) -> float:
        """The seconds of `work` in the fastest round, because other processes can only add time.

        Args:
            work: queues the work to time.
            group: the ranks that do the work, all by default; exactly these ranks call this.
            count: repetitions in a round; by default as many as take 5 ms on the slowest rank.
        """
        group = group or self.world
        work()
        once = self._round(work, 1, group)
        count = count or max(1, min(10_000, int(_ROUND_SECONDS / once)))
        return min(self._round(work, count, group) for _ in range(_ROUNDS))

    def call_seconds(self, call: Work, group: Group) -> float:
        """The seconds of a call between the ranks of `group`.

        On a CPU, time matrix products with and without calls between them, and subtract: in a training, ranks
        arrive at slightly different times, so a call that is repeated without a break is too fast.
        """
        if self.device.type == "cuda":
            return self.seconds(call, group)
        left, right = torch.randn(512, 256), torch.randn(256, 1024)

        def both() -> None:
            torch.mm(left, right)
            call()

        alone, together = [], []
        for _ in range(_ROUNDS // 2):
            alone.append(self._round(partial(torch.mm, left, right), _CALLS, group))
            together.append(self._round(both, _CALLS, group))
        return max(1e-6, statistics.median(together) - statistics.median(alone))

    def _round(self, work: Work, count: int, group: Group) -> float:
        self._wait()
        group.barrier()
        start = time.perf_counter()
        for _ in range(count):
            work()
        self._wait()
        taken = torch.tensor([(time.perf_counter() - start) / count], device=self.device)
        group.all_reduce(taken, "max")
        return float(taken)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(world: Group, device: torch.device, sizes: MeasuredSizes) -> MachineMeasurements:
    """Measure the machine; every rank of `world` calls this at the same time."""
    clock, measured = RankClock(world, device), MachineMeasurements()
    _measure_products(sizes, clock, measured)
    _measure_attention(sizes, clock, measured)
    _measure_memory(sizes, clock, measured)
    _measure_calls(sizes, clock, measured)
    return measured


def _measure_products(sizes: MeasuredSizes, clock: RankClock, measured: MachineMeasurements) -> None:
    tables: dict[str, list[list[float]]] = {}
    for dtype in sizes.dtypes:
        name = str(dtype).removeprefix("torch.")
        for m, n, k in sizes.products:
            a = torch.randn(m, k, device=clock.device, dtype=dtype)
            b = torch.randn(n, k, device=clock.device, dtype=dtype).t()
            out = torch.empty(m, n, device=clock.device, dtype=dtype)
            rate = 2 * m * n * k / clock.seconds(partial(torch.mm, a, b, out=out)) / 1e12
            tables.setdefault(name, []).append([m, n, k, _rounded(rate)])
            measured.lines.append((f"product, {name}", f"{m} x {n} x {k}", f"{1e3 * rate:,.1f} GFLOP/s"))
    measured.compute["matmul_mnk_tflop_per_s"] = tables


def _measure_attention(sizes: MeasuredSizes, clock: RankClock, measured: MachineMeasurements) -> None:
    sequence, heads, width = sizes.attention
    rates: dict[str, list[float]] = {}
    for dtype in sizes.dtypes[:2]:
        name = str(dtype).removeprefix("torch.")
        shape = (sequence, 1, heads, width)
        q, k, v = (torch.randn(shape, device=clock.device, dtype=dtype, requires_grad=True) for _ in range(3))

        forward = partial(attention, q, k, v, causal=True)

        def both(forward: Callable[[], Tensor] = forward) -> None:
            out = forward()
            out.backward(out)

        ahead, whole = clock.seconds(forward), clock.seconds(both)
        behind = max(whole - ahead, whole / 2)
        flops = (
            2.0 * heads * width * sequence * (sequence + 1)
        )  # two products over the pairs of a causal mask
        rates[name] = [_rounded(flops / ahead / 1e12), _rounded(2.5 * flops / behind / 1e12)]
        for way, rate in zip(("forward", "backward"), rates[name], strict=True):
            size = f"{sequence} tokens, {heads} heads of {width}"
            measured.lines.append((f"attention {way}, {name}", size, f"{1e3 * rate:,.1f} GFLOP/s"))
    measured.compute["attention_tflop_per_s"] = rates


def _measure_memory(sizes: MeasuredSizes, clock: RankClock, measured: MachineMeasurements) -> None:
    source = torch.ones(sizes.copied_mib * MIB // 4, device=clock.device)
    target = torch.empty_like(source)
    rate = 2 * sizes.copied_mib * MIB / clock.seconds(partial(target.copy_, source)) / 1e9
    launch = clock.seconds(partial(torch.ones(1, device=clock.device).add_, 1))
    measured.memory.update(bandwidth_gb_per_s=_rounded(rate), reached_share=1)
    measured.compute["launch_us"] = _rounded(1e6 * launch)
    measured.lines.append(("copy, read and written", f"{sizes.copied_mib} MiB", f"{rate:,.1f} GB/s"))
    measured.lines.append(("an operator", "1 element", f"{1e6 * launch:,.1f} µs"))


def _measure_calls(sizes: MeasuredSizes, clock: RankClock, measured: MachineMeasurements) -> None:
    """Measure calls between the first 2, 4, 8, ... ranks, and between all."""
    world = clock.world
    counts = [2**i for i in range(1, 12) if 2**i < world.size] + [world.size] * (world.size > 1)
    curves: dict[str, dict[str, object]] = {operation: {} for operation in _OPERATIONS}
    for count in counts:
        ranks = tuple(range(count))
        if world.rank in ranks:
            group = (
                world if count == world.size else open_group(f"first {count}", world.rank, ranks, _PATIENCE)
            )
            for operation in _OPERATIONS:
                curves[operation][str(count)] = _curve(operation, sizes, clock, group, measured)
        world.barrier()
    message = _curve("message", sizes, clock, world, measured)
    measured.inside_node.update(collectives=curves, message=message)


def _curve(
    operation: str, sizes: MeasuredSizes, clock: RankClock, group: Group, measured: MachineMeasurements
) -> dict[str, object]:
    """Measure the document of a `Curve`: the time of a small payload, and the bus bandwidth by size."""
    count = group.size
    share = {"message": 1.0, "all_reduce": 2 * (count - 1) / count}.get(operation, (count - 1) / count)

    def seconds(nbytes: float) -> float:
        elements = max(1, int(nbytes) // 4 // count) * count
        return clock.call_seconds(_call(operation, group, torch.ones(elements, device=clock.device)), group)

    alpha = 1e6 * seconds(_ALPHA_BYTES)
    rates = {mib: share * mib * MIB / seconds(mib * MIB) / 1e9 for mib in sizes.payloads_mib}
    what = "message" if operation == "message" else f"{operation} of {count}"
    measured.lines.append((what, f"{_ALPHA_BYTES} B", f"{alpha:,.0f} µs"))
    measured.lines += [(what, f"{mib:g} MiB", f"{rate:,.2f} GB/s") for mib, rate in rates.items()]
    table = {f"{mib:g}": _rounded(rate) for mib, rate in rates.items()}
    return {"alpha_us": _rounded(alpha), "gb_per_s_by_mib": table}


def _call(operation: str, group: Group, payload: Tensor) -> Work:
    """A call whose larger side is `payload`; a message goes from the first rank to the second."""
    part = payload[: len(payload) // group.size].clone()
    match operation:
        case "all_reduce":
            return partial(group.all_reduce, payload, "max")
        case "all_gather":
            return partial(group.all_gather, payload, part)
        case "reduce_scatter":
            return partial(group.reduce_scatter, part, payload, "max")
        case "all_to_all":
            return partial(group.all_to_all, torch.empty_like(payload), payload)
    if group.size == 1:
        return payload.clone
    transfers = [Transfer("recv" if group.rank else "send", payload, 1 - group.rank)]
    # The other ranks do something that takes no time.
    return (lambda: [work.wait() for work in group.exchange(transfers)]) if group.rank < 2 else payload.size


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def without_repeats(rows: Sequence[MeasuredRow]) -> Iterator[MeasuredRow]:
    """Yield the rows, with an empty first cell where it repeats the row above."""
    last = ""
    for what, size, rate in rows:
        yield ("" if what == last else what, size, rate)
        last = what
