"""A device as data: what it computes, holds and moves, and at which rates programs have seen it do so.

The devices of this folder's ``devices`` are known by name; others are files of the same form, as `megazero
profile` writes them. Each key ends with its unit. TFLOP are 10^12, GB 10^9 and GiB 2^30; a Gbit is an eighth
of a GB; the rate of a link is that of one way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import (
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)

from megazero.errors import ConfigError
from megazero.regular_file import read_regular_text, why_unreadable

MIB = 2**20
_FOLDER = Path(__file__).with_name("devices")
_LINK_GB_PER_S = (20, 25, 25, 25, 50)
"""One way over one link of NVLink, by generation from the first; the second is V100's."""


class _Strict:
    """How documents are read: no key that is not known, and no number that is none."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class Curve(_Strict):
    """The rate at which payloads of some sizes went, by MiB; `alpha_us` is the time of the smallest."""

    alpha_us: NonNegativeFloat
    gb_per_s_by_mib: dict[PositiveFloat, PositiveFloat]

    def seconds(self, nbytes: float, times: float = 1) -> float:
        """The time for `nbytes` that go over the link `times` times.

        It is linear between the sizes; beyond the largest one, its rate stays.
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
class Tiles(_Strict):
    """How products are cut into tiles, of which each processor takes one at a time.

    Attributes:
        mnk: sizes of a tile. m and n may be swapped, and a partial tile costs more.
        processors: 0 where products are not cut like this, as on a CPU.
        alignment_reached_share: the share of its rate that a product reaches, by the largest power of two
            that divides both n and k; 1 for what is not there.
    """

    mnk: tuple[PositiveInt, PositiveInt, PositiveInt]
    processors: NonNegativeInt
    alignment_reached_share: dict[PositiveInt, PositiveFloat]

    def filled(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """The share of the processors' time that works on the product: the rest is padding and last waves.

        A library chooses among whole and half tiles, and may split k among processors, which costs.
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
class Compute(_Strict):
    """Arithmetic.

    Attributes:
        peak_tflop_per_s: by torch's name of the dtype, without sparsity; float32 is TF32 where there is one.
        matmul_mnk_tflop_per_s: rows (m, n, k, rate reached) by dtype.
        matmul_like: for a dtype without rows, the one whose rows count, and how many times as fast it is.
        attention_tflop_per_s: what fused attention reaches (forward, backward), by dtype.
        tiles: how a product is cut for the processors.
        launch_us: what each kernel, or operator on a CPU, costs on top.
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
class Memory(_Strict):
    """A device's memory: its size as the driver reports it, and what no allocator of torch's ever has.

    Attributes:
        size_gib, outside_allocator_gib: context, communicators, workspaces and fragments are outside.
        bandwidth_gb_per_s: the datasheet's.
        reached_share: what kernels that only move data reach of it.
        apart: whether it is apart from the host's; if not, a plan can run the kernels.
    """

    size_gib: PositiveFloat
    outside_allocator_gib: NonNegativeFloat
    bandwidth_gb_per_s: PositiveFloat
    reached_share: PositiveFloat
    apart: bool = True


@dataclass(frozen=True)
class InsideNode(_Strict):
    """Ranks that reach each other without a network.

    Attributes:
        ranks: the number of them: a node's, or an NVLink domain's.
        nvlink_generation, nvlink_links, nvlink_gb_per_s_one_way: 0 where there is no NVLink.
        nvls_from_ranks: the smallest group whose sums a switch makes; 0 for none.
        collectives: the bus bandwidth (as nccl-tests defines it) by operation and number of ranks, by the
            size of the larger side.
        message: one message between two ranks.
    """

    ranks: PositiveInt
    nvlink_generation: NonNegativeInt
    nvlink_links: NonNegativeInt
    nvlink_gb_per_s_one_way: NonNegativeFloat
    nvls_from_ranks: NonNegativeInt
    collectives: dict[str, dict[PositiveInt, Curve]]
    message: Curve


@dataclass(frozen=True)
class BetweenNodes(_Strict):
    """The network; the curves are of what one rank's share of its node's NICs carries."""

    nic_gbit_per_s_per_rank: PositiveFloat
    collective: Curve
    message: Curve


@dataclass(frozen=True)
class Host(_Strict):
    """The computer around the devices: its memory and disks, which its devices share."""

    devices: PositiveInt
    link_gb_per_s_one_way: PositiveFloat
    memory_gib: PositiveFloat
    memory_gb_per_s: PositiveFloat
    nvme_read_gb_per_s: PositiveFloat
    nvme_write_gb_per_s: PositiveFloat


@dataclass(frozen=True)
class Device(_Strict):
    """All that a plan knows of a device; `sources` says, key by key or for a whole part, who measured it."""

    name: str
    compute: Compute
    memory: Memory
    inside_node: InsideNode
    between_nodes: BetweenNodes
    host: Host
    sources: dict[str, str]

    @classmethod
    def load(cls, name: str | Path) -> Device:
        """Read the device that is called `name`, or that the file `name` describes.

        Raises:
            ConfigError: there is no such device or file; or it has keys that are missing, unknown, without a
                source or implausible, all of which are listed.
        """
        path = _FOLDER / f"{name}.json"
        if str(name) not in known_devices():
            path = Path(name)
            if not path.exists():
                raise ConfigError(
                    f"`--device` must be one of {', '.join(known_devices())} or a file, but is `{name}`; "
                    "choose one, or write one with `megazero profile`"
                )
        return cls.of(_document(path), str(path))

    @classmethod
    def of(cls, document: Mapping[str, Any], where: str = "the device") -> Device:
        """The device that a document describes; `where` names it in errors.

        Raises:
            ConfigError: as for `load`.
        """
        try:
            device = TypeAdapter(cls).validate_python(document)
        except ValidationError as error:
            raise ConfigError([_violation(where, problem) for problem in error.errors()]) from None
        violations = [f"{where}: {text}" for text in (*_implausible(device), *_without_source(document))]
        if violations:
            raise ConfigError(violations)
        return device

    def document(self) -> dict[str, Any]:
        """The document that `of` reads."""
        document: dict[str, Any] = TypeAdapter(Device).dump_python(self, mode="json")
        return document

    @property
    def allocator_bytes(self) -> int:
        """The bytes that torch's allocator can have."""
        return int((self.memory.size_gib - self.memory.outside_allocator_gib) * 2**30)

    def peak_flop_per_s(self, dtype: str) -> float:
        """The peak for a dtype, which utilizations are shares of.

        Raises:
            ConfigError: the device does not multiply such numbers.
        """
        if dtype not in self.compute.peak_tflop_per_s:
            raise ConfigError(
                f"The dtype must be one that {self.name} multiplies "
                f"({', '.join(self.compute.peak_tflop_per_s)}), but is {dtype}; choose another device"
            )
        return self.compute.peak_tflop_per_s[dtype] * 1e12

    def with_nic(self, gbit_per_s_per_rank: float) -> Device:
        """The device in nodes with other NICs, whose curves are taken to keep their shape."""
        now = self.between_nodes
        by = gbit_per_s_per_rank / now.nic_gbit_per_s_per_rank
        links = BetweenNodes(gbit_per_s_per_rank, now.collective.scaled(by), now.message.scaled(by))
        return replace(self, between_nodes=links)

    def without_nvls(self) -> Device:
        """The device with sums made by the ranks, in a ring: at the bus bandwidth of a reduce-scatter."""
        tables = self.inside_node.collectives
        tables = {**tables, "all_reduce": _ring(tables)} if self.inside_node.nvls_from_ranks else tables
        return replace(self, inside_node=replace(self.inside_node, collectives=tables, nvls_from_ranks=0))


def known_devices() -> list[str]:
    """The names of the devices that come with the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def _ring(tables: Mapping[str, Mapping[int, Curve]]) -> dict[int, Curve]:
    """Curves of all-reduces in a ring, which goes around twice at the bus bandwidth of a reduce-scatter."""
    alphas = {ranks: curve.alpha_us for ranks, curve in tables["all_reduce"].items()}
    rings = tables["reduce_scatter"]
    return {
        ranks: replace(rings[ranks], alpha_us=alphas.get(ranks, rings[ranks].alpha_us)) for ranks in rings
    }


def _document(path: Path) -> dict[str, Any]:
    """A file's content, laid over that of the device that it is `like`."""
    try:
        document = json.loads(read_regular_text(path))
    except OSError as error:
        raise ConfigError(f"`{path}` must be a readable file, but is not: {why_unreadable(error)}") from None
    except ValueError as error:
        raise ConfigError(f"`{path}` must be JSON, but is not: {error}; correct it") from None
    if not isinstance(document, dict):
        raise ConfigError(f"`{path}` must be a JSON object, but is {type(document).__name__}; correct it")
    like = document.pop("like", None)
    if like is None:
        return document
    if like not in known_devices():
        raise ConfigError(f"{path}: `like` must be one of {', '.join(known_devices())}, but is {like!r}")
    return _laid_over(_document(_FOLDER / f"{like}.json"), document)


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` with the keys of `above`; parts are laid over each other, tables and lists replaced."""
    merged = dict(below)
    for key, value in above.items():
        parts = isinstance(value, dict) and isinstance(below.get(key), dict) and key in _PARTS
        merged[key] = {**below[key], **value} if parts else value
    return merged


_PARTS = frozenset(("compute", "memory", "inside_node", "between_nodes", "host", "sources"))


def _violation(where: str, problem: Mapping[str, Any]) -> str:
    key = ".".join(str(part) for part in problem["loc"] if part != "[key]") or "the document"
    if problem["type"] == "missing":
        return f"{where}: `{key}` must be there, but is missing; add it"
    if problem["type"] == "unexpected_keyword_argument":
        return f"{where}: `{key}` must be a key of a device, but is not; remove it, or correct its unit"
    return f"{where}: `{key}` is refused, {problem['msg'].lower()}, but is {problem['input']!r}; correct it"


def _without_source(document: Mapping[str, Any]) -> Iterator[str]:
    """Keys of measures of which nobody says where they are from."""
    sources = document["sources"]
    for part in sorted(_PARTS - {"sources"}):
        for key, value in document[part].items():
            if not isinstance(value, bool) and part not in sources and f"{part}.{key}" not in sources:
                yield f"`sources` must say where `{part}.{key}` is from, but does not; add it"


def _implausible(device: Device) -> Iterator[str]:
    """Numbers that no such device can have: wrong units, most often."""
    inside, memory = device.inside_node, device.memory
    generation = inside.nvlink_generation
    if generation > len(_LINK_GB_PER_S):
        yield f"`inside_node.nvlink_generation` must be at most {len(_LINK_GB_PER_S)}, but is {generation}"
        return
    most = inside.nvlink_links * _LINK_GB_PER_S[generation - 1] if generation else 0
    if inside.nvlink_gb_per_s_one_way > 1.001 * most:
        yield (
            f"`inside_node.nvlink_gb_per_s_one_way` must be at most {most}, that of {inside.nvlink_links} "
            f"links of generation {generation}, but is {inside.nvlink_gb_per_s_one_way:g}; both ways "
            "together are twice one way"
        )
    if memory.outside_allocator_gib >= memory.size_gib:
        yield "`memory.outside_allocator_gib` must be below `memory.size_gib`, but is not; correct it"
    if memory.reached_share > 1:
        yield f"`memory.reached_share` must be at most 1, but is {memory.reached_share:g}; correct it"
    yield from _above_wires(device)
    yield from _above_peaks(device.compute)


def _above_wires(device: Device) -> Iterator[str]:
    inside, between = device.inside_node, device.between_nodes
    wire = inside.nvlink_gb_per_s_one_way or math.inf
    nic = between.nic_gbit_per_s_per_rank / 8
    curves = [
        ("inside_node.message", inside.message, wire),
        ("between_nodes.collective", between.collective, nic),
        ("between_nodes.message", between.message, nic),
    ]
    for operation, tables in inside.collectives.items():
        for ranks, curve in tables.items():
            # With sums in the switch, a rank sends its data once; bus bandwidth counts 2(n-1)/n times.
            nvls = operation == "all_reduce" and 0 < inside.nvls_from_ranks <= ranks
            most = wire * (2 * (ranks - 1) / ranks if nvls else 1)
            curves.append((f"inside_node.collectives.{operation}.{ranks}", curve, most))
    for key, curve, most in curves:
        best = max(curve.gb_per_s_by_mib.values(), default=0)
        if not 0 < best <= most:
            yield f"`{key}` must be at most {most:g} GB/s, that of the wire, but is {best:g}; correct it"


def _above_peaks(compute: Compute) -> Iterator[str]:
    reached = {dtype: (rows, 1.0) for dtype, rows in compute.matmul_mnk_tflop_per_s.items()}
    for dtype, (like, by) in compute.matmul_like.items():
        reached[dtype] = (compute.matmul_mnk_tflop_per_s.get(like, []), by)
    for dtype, (rows, by) in reached.items():
        best, peak = by * max((row[3] for row in rows), default=0), compute.peak_tflop_per_s.get(dtype, 0)
        if not 0 < best <= peak:
            key = "matmul_like" if dtype in compute.matmul_like else "matmul_mnk_tflop_per_s"
            yield f"`compute.{key}.{dtype}` must have a rate of at most {peak:g}, the peak, but has {best:g}"
