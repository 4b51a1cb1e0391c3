"""The time that the work of a rank takes on a device: each kernel, and each call between ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from megazero.account.profilers.calls import Call, bus_factor
from megazero.errors import ConfigError
from megazero.plan.device import Curve, Device
from megazero.plan.work import Kernel

Rows = Sequence[tuple[int, int, int, float]]


class Prices:
    """Costs of work on a device.

    Args:
        device: it.
        gpus_per_node: the ranks that share a node; rank r is on node r // gpus_per_node. As many as the
            device's nodes have, by default.
        efficiency: the share of the device's rates that kernels of this software reach; a generation of
            software has one. The device's `reached_in_training` by default. Calls between ranks are not
            affected.
    """

    def __init__(self, device: Device, gpus_per_node: int | None = None, efficiency: float | None = None):
        self.device = device
        self.gpus_per_node = gpus_per_node or device.inside_node.ranks
        self.efficiency = device.compute.reached_in_training if efficiency is None else efficiency
        self._rates: dict[tuple[str, int, int, int, int], float] = {}
        self._tables: dict[str, tuple[Rows, float, float]] = {}
        if self.gpus_per_node < 1 or self.efficiency <= 0:
            raise ConfigError(
                "GPUs per node and efficiency must be above 0, but are "
                f"{self.gpus_per_node} and {self.efficiency:g}; correct them"
            )

    def kernel(self, kernel: Kernel) -> float:
        """The seconds of a kernel: computing and moving its bytes, and its launch.

        The two hide each other, but not all of the shorter one: near the end of a tile there is nothing left
        to compute while its sums are written. So they are added like the sides of a right angle.

        Raises:
            ConfigError: it multiplies numbers of a dtype that the device does not.
        """
        memory, compute = self.device.memory, self.device.compute
        moving = kernel.nbytes / (memory.bandwidth_gb_per_s * memory.reached_share * 1e9)
        return math.hypot(moving, self._computing(kernel)) / self.efficiency + compute.launch_us * 1e-6

    def call(self, call: Call) -> float:
        """The seconds of a call if nothing else is in its way.

        Inside a node the device's tables say it. Between nodes it is as long as the slower of two: the part
        inside the nodes, and each NIC's part, where the members of a node share the work; rings run through
        both at once. For k nodes of g members, a NIC carries (k - 1)/k of a g-th of the payload, and twice
        that for sums; of an all-to-all, all of it.

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
        """The seconds of an update of masters and moments that are in the host's memory, or on its disks.

        Buckets pass one after the other, so the slowest of four decides: the host's memory, where all of it
        is read and written; the link, on which gradients come and weights go, in fp32 at most; and the
        disks' reading and writing. A host's devices share its memory and disks.
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

        It is interpolated between the rates that were measured, without what tiles and waves take of them
        (`Tiles.filled`), and has its own part taken off. No rate is above the fastest that was measured.

        Raises:
            ConfigError: the device does not multiply numbers of `dtype`.
        """
        key = (dtype, m, n, k, batch)
        if key not in self._rates:
            rows, by, most = self._rows(dtype)
            compute = self.device.compute
            rate = min(most, interpolated(rows, (m, n, k)) * compute.tiles.filled(m, n, k, batch))
            aligned = math.gcd(n, k, 2**20)
            self._rates[key] = rate * by * 1e12 * compute.tiles.alignment_reached_share.get(aligned, 1.0)
        return self._rates[key]

    def _rows(self, dtype: str) -> tuple[Rows, float, float]:
        """Rates of products that fill their tiles, by size; how many times as fast; the fastest measured."""
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

    def _inside(self, call: Call, ranks: int) -> float:
        """The seconds of a call between ranks of one node: between the two nearest numbers of ranks."""
        tables = self.device.inside_node.collectives
        # A ring passes a broadcast on as it does a gather.
        like = "all_gather" if call.operation in ("barrier", "broadcast") else call.operation
        if not tables.get(like):
            known = [operation for operation in tables if tables[operation]]
            raise ConfigError(
                f"A call's operation must be one that {self.device.name} has rates for "
                f"({', '.join(known) or 'none'}), but is {call.operation}; add them, or measure more ranks"
            )
        nbytes = 0 if call.operation == "barrier" else call.nbytes
        return _for_ranks(tables[like], ranks).seconds(nbytes, bus_factor(call.operation, ranks))


def interpolated(rows: Rows, sizes: tuple[int, int, int]) -> float:
    """The rate at `sizes` (m, n, k): a mean of those of rows (m, n, k, rate), so never above them."""
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


def _for_ranks(tables: Mapping[int, Curve], ranks: int) -> Curve:
    """The curve of the nearest number of ranks that was measured."""
    return tables[min(tables, key=lambda known: (abs(math.log2(known / ranks)), known))]
