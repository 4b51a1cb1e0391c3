"""The time that each kernel of a rank, and each call between ranks, takes on a device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from megazero.account.profilers.calls import CollectiveCall, bus_factor
from megazero.errors import ConfigError
from megazero.plan.device import Device
from megazero.plan.work import Kernel

ProductRates = Sequence[tuple[int, int, int, float]]


class Prices:
    """The times of work on a device.

    Args:
        device: the device.
        gpus_per_node: the ranks of a node; rank r is on node r // gpus_per_node. By default, as many as the
            device's nodes have.
        efficiency: the share of the device's rates that kernels reach; it depends on the generation of the
            software. By default the device's `reached_in_training`. Calls between ranks are not affected.
    """

    def __init__(self, device: Device, gpus_per_node: int | None = None, efficiency: float | None = None):
        self.device = device
        self.gpus_per_node = gpus_per_node or device.inside_node.ranks
        self.efficiency = device.compute.reached_in_training if efficiency is None else efficiency
        self._rates: dict[tuple[str, int, int, int, int], float] = {}
        self._tables: dict[str, tuple[ProductRates, float, float]] = {}
        if self.gpus_per_node < 1 or self.efficiency <= 0:
            raise ConfigError(
                "GPUs per node and efficiency must be above 0, but are "
                f"{self.gpus_per_node} and {self.efficiency:g}; correct them"
            )

    def kernel(self, kernel: Kernel) -> float:
        """The seconds of a kernel: arithmetic, memory traffic, and the launch.

        Arithmetic and traffic overlap, but not wholly: near the end of a tile, sums are written while nothing
        is left to compute. So the time is the root of the sum of their squares.

        Raises:
            ConfigError: the device has no rate for the kernel's dtype.
        """
        memory, compute = self.device.memory, self.device.compute
        moving = kernel.nbytes / (memory.bandwidth_gb_per_s * memory.reached_share * 1e9)
        return math.hypot(moving, self._computing(kernel)) / self.efficiency + compute.launch_us * 1e-6

    def call(self, call: CollectiveCall) -> float:
        """The seconds of a call that shares its links with no other.

        Inside a node, the device's tables have it. Between nodes, rings run inside nodes and over NICs at the
        same time, so the slower of the two counts. For k nodes of g members, a NIC carries (k - 1)/k of a
        g-th of the payload; twice that for sums; and for an all-to-all (k - 1)/k of the whole payload.

        Raises:
            ConfigError: the operation is unknown.
        """
        ranks = len(call.ranks)
        if ranks < 2:
            return 0
        members = Counter(rank // self.gpus_per_node for rank in call.ranks)
        nodes, largest = len(members), max(members.values())
        inside, between = self.device.inside_node, self.device.between_nodes
        if call.operation in ("send", "recv", "exchange"):
            return (inside if nodes == 1 else between).message.seconds(call.nbytes)
        time = self._inside(call, largest) if largest > 1 else 0.0
        if nodes > 1:
            share = 1 if call.operation == "all_to_all" else largest
            rounds = bus_factor(call.operation, nodes)
            time = max(time, between.collective.seconds(rounds * call.nbytes / share))
        return time

    def offloaded(self, place: str, kinds: Mapping[str, int]) -> float:
        """The seconds of an update of masters and moments in the host's memory, or on its disks.

        Buckets are processed in a pipeline, so its slowest part counts: the host's memory, which is read and
        written; the link, over which gradients come and weights go, in fp32 at most; reads from disk; writes
        to disk. A host's devices share its memory and disks.

        Args:
            place: ``cpu`` or ``nvme``.
            kinds: a rank's bytes in that place, by kind.
        """
        host = self.device.host
        state = kinds["masters"] + kinds["moments"]
        seconds = [
            (2 * state + kinds["gradients"]) * host.devices / host.memory_gb_per_s,
            max(kinds["gradients"], kinds["masters"]) / host.link_gb_per_s_one_way,
        ]
        if place == "nvme":
            read, written = state + kinds["gradients"], state
            seconds += [read * host.devices / host.nvme_read_gb_per_s]
            seconds += [written * host.devices / host.nvme_write_gb_per_s]
        return max(seconds) / 1e9

    def matmul_flop_per_s(self, dtype: str, m: int, n: int, k: int, batch: int = 1) -> float:
        """The rate of `batch` products of [m, k] and [k, n].

        Measured rates are divided by the share of time that tiles fill (`Tiles.filled`), interpolated, and
        multiplied by this product's share. No rate is above the fastest measured one.

        Raises:
            ConfigError: the device has no rate for `dtype`.
        """
        key = (dtype, m, n, k, batch)
        if key not in self._rates:
            rates, by, most = self._product_rates(dtype)
            compute = self.device.compute
            rate = min(most, interpolated(rates, (m, n, k)) * compute.tiles.filled(m, n, k, batch))
            aligned = math.gcd(n, k, 2**20)
            self._rates[key] = rate * by * 1e12 * compute.tiles.alignment_reached_share.get(aligned, 1.0)
        return self._rates[key]

    def _product_rates(self, dtype: str) -> tuple[ProductRates, float, float]:
        """Products' rates if tiles were filled, the dtype's factor of them, the fastest measured rate."""
        if dtype not in self._tables:
            compute = self.device.compute
            like, by = compute.matmul_like.get(dtype, (dtype, 1.0))
            if like not in compute.matmul_mnk_tflop_per_s:
                self.device.peak_flop_per_s(dtype)
                raise ConfigError(
                    f"`compute.matmul_mnk_tflop_per_s` of {self.device.name} must have rows for {dtype}, but "
                    "has none; add them, or name another dtype in `compute.matmul_like`"
                )
            measured = compute.matmul_mnk_tflop_per_s[like]
            rows = [(m, n, k, rate / compute.tiles.filled(m, n, k)) for m, n, k, rate in measured]
            self._tables[dtype] = rows, by, max(row[3] for row in measured)
        return self._tables[dtype]

    def _computing(self, kernel: Kernel) -> float:
        if not kernel.flops:
            return 0
        dtype, compute = str(kernel.dtype).removeprefix("torch."), self.device.compute
        if kernel.name.startswith("attention_"):
            rates = compute.attention_tflop_per_s.get(dtype)
            if rates is not None:
                return kernel.flops / (rates["backward" in kernel.name] * 1e12)
        if kernel.sizes is None:
            side = max(1, round((kernel.flops / 2) ** (1 / 3)))
            return kernel.flops / self.matmul_flop_per_s(dtype, side, side, side)
        return kernel.flops / self.matmul_flop_per_s(dtype, *kernel.sizes, kernel.batch)

    def _inside(self, call: CollectiveCall, ranks: int) -> float:
        """The seconds of a call between ranks of one node, by the nearest measured number of ranks."""
        tables = self.device.inside_node.collectives
        # A ring takes as long for a broadcast as for an all-gather.
        like = "all_gather" if call.operation in ("barrier", "broadcast") else call.operation
        if not tables.get(like):
            known = [operation for operation in tables if tables[operation]]
            raise ConfigError(
                f"A call's operation must be one that {self.device.name} has rates for "
                f"({', '.join(known) or 'none'}), but is {call.operation}; add them, or measure more ranks"
            )
        nbytes = 0 if call.operation == "barrier" else call.nbytes
        nearest = min(tables[like], key=lambda known: (abs(math.log2(known / ranks)), known))
        return tables[like][nearest].seconds(nbytes, bus_factor(call.operation, ranks))


def interpolated(rows: ProductRates, sizes: tuple[int, int, int]) -> float:
    """The rate at `sizes` (m, n, k): a weighted mean of the rates of `rows` (m, n, k, rate)."""
    total = weights = 0.0
    shortest = min(row[2] for row in rows)
    point = [math.log2(size) for size in (*sizes[:2], max(sizes[2], shortest))]
    for *row, rate in rows:
        distance = sum((math.log2(a) - b) ** 2 for a, b in zip(row, point, strict=True))
        weight = 1 / (distance**2 + 1e-9)
        total += weight * math.log2(rate)
        weights += weight
    fill = min(1.0, sizes[2] / (sizes[2] + 64) * (shortest + 64) / shortest)
    return float(2 ** (total / weights) * fill)
