"""The parts of a device as data: rates of arithmetic, memory, links inside a node, network, host."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

MIB = 2**20


class Strict:
    """A base that makes pydantic refuse unknown keys, infinities and NaN."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class Curve(Strict):
    """The rates reached with some sizes of payload, in MiB; `alpha_us` is the smallest payload's time."""

    alpha_us: NonNegativeFloat
    gb_per_s_by_mib: dict[PositiveFloat, PositiveFloat]

    def seconds(self, nbytes: float, times: float = 1) -> float:
        """The time for `nbytes` that cross the link `times` times.

        The time is interpolated linearly between sizes; beyond the largest size, its rate applies.
        """
        left, start = 0.0, self.alpha_us * 1e-6
        for mib, rate in sorted(self.gb_per_s_by_mib.items()):
            right, end = mib * MIB, max(times * mib * MIB / (rate * 1e9), start)
            if nbytes <= right:
                return start + (end - start) * (nbytes - left) / (right - left)
            left, start = right, end
        return start * nbytes / left

    def scaled(self, by: float) -> Curve:
        """The curve of a link that is `by` times as fast."""
        return replace(self, gb_per_s_by_mib={mib: by * rate for mib, rate in self.gb_per_s_by_mib.items()})


@dataclass(frozen=True)
class Tiles(Strict):
    """How matrix products are divided into tiles, of which each processor computes one at a time.

    Attributes:
        mnk: sizes of a tile. m and n may be swapped, and a partial tile costs more.
        processors: the number of processors; 0 if the device does not compute in tiles, as a CPU.
        alignment_reached_share: the share of its rate that a product reaches, by the largest power of two
            that divides both n and k; 1 for powers that are not listed.
    """

    mnk: tuple[PositiveInt, PositiveInt, PositiveInt]
    processors: NonNegativeInt
    alignment_reached_share: dict[PositiveInt, PositiveFloat]

    def filled(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """The share of the processors' time that goes to the product, not to padding or an idle last wave.

        A library takes the best of whole and half tiles, and may split k among processors, at some cost.
        """
        if not self.processors:
            return 1.0
        long, short, deep = self.mnk
        options = []
        for rows, columns, worth in ((long, short, 1.0), (short, long, 1.0), (short, short, 0.93)):
            tiles = -(-m // rows) * -(-n // columns) * batch
            for splits in (1, 2, 4) if k >= 2048 else (1,):
                waves = -(-tiles * splits // self.processors)
                used = m * n * batch * splits / (waves * self.processors * rows * columns)
                options.append(used * worth * 0.92 ** (splits.bit_length() - 1))
        return max(options) * k / (-(-k // deep) * deep)


@dataclass(frozen=True)
class Compute(Strict):
    """A device's rates of arithmetic.

    Attributes:
        peak_tflop_per_s: by torch's name of the dtype, without sparsity; float32 is TF32 if the device has
            it.
        matmul_mnk_tflop_per_s: rows (m, n, k, rate reached) by dtype.
        matmul_like: for a dtype without rows, (the dtype whose rows apply, the factor of their rates).
        attention_tflop_per_s: (forward, backward) rates of fused attention by dtype.
        tiles: how products are divided into tiles.
        launch_us: the constant cost of each kernel, or of each operator on a CPU.
        reached_in_training: the share of these rates, and of the memory's, that a whole training reaches.
    """

    peak_tflop_per_s: dict[str, PositiveFloat]
    matmul_mnk_tflop_per_s: dict[str, list[tuple[PositiveInt, PositiveInt, PositiveInt, PositiveFloat]]]
    matmul_like: dict[str, tuple[str, PositiveFloat]]
    attention_tflop_per_s: dict[str, tuple[PositiveFloat, PositiveFloat]]
    tiles: Tiles
    launch_us: NonNegativeFloat
    reached_in_training: PositiveFloat


@dataclass(frozen=True)
class Memory(Strict):
    """A device's memory.

    Attributes:
        size_gib: the size that the driver reports.
        outside_allocator_gib: the part that torch's allocator cannot use: CUDA's context, communicators,
            workspaces and fragments.
        bandwidth_gb_per_s: the bandwidth in the datasheet.
        reached_share: the share of the bandwidth that kernels without arithmetic reach.
        apart: whether the memory is separate from the host's; if not, a plan can run the kernels here.
    """

    size_gib: PositiveFloat
    outside_allocator_gib: NonNegativeFloat
    bandwidth_gb_per_s: PositiveFloat
    reached_share: PositiveFloat
    apart: bool = True


@dataclass(frozen=True)
class InsideNode(Strict):
    """Ranks that reach each other without a network.

    Attributes:
        ranks: the number of ranks in a node or an NVLink domain.
        nvlink_generation, nvlink_links, nvlink_gb_per_s_one_way: 0 without NVLink.
        nvls_from_ranks: the smallest group whose sums a switch computes (NVLS); 0 if it never does.
        collectives: by operation and number of ranks, the bus bandwidth (as nccl-tests defines it) over the
            size of the larger of input and output.
        message: the curve of a message between two ranks.
    """

    ranks: PositiveInt
    nvlink_generation: NonNegativeInt
    nvlink_links: NonNegativeInt
    nvlink_gb_per_s_one_way: NonNegativeFloat
    nvls_from_ranks: NonNegativeInt
    collectives: dict[str, dict[PositiveInt, Curve]]
    message: Curve


@dataclass(frozen=True)
class BetweenNodes(Strict):
    """The network between nodes; the curves are of one rank's share of its node's NICs."""

    nic_gbit_per_s_per_rank: PositiveFloat
    collective: Curve
    message: Curve


@dataclass(frozen=True)
class HostMachine(Strict):
    """The computer that holds the devices, which share its memory and disks."""

    devices: PositiveInt
    link_gb_per_s_one_way: PositiveFloat
    memory_gib: PositiveFloat
    memory_gb_per_s: PositiveFloat
    nvme_read_gb_per_s: PositiveFloat
    nvme_write_gb_per_s: PositiveFloat
