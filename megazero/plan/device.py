"""A device as data: its sizes, its peaks, and the rates that programs have reached on it.

The devices in the folder ``devices`` are known by name; others are files of the same form, such as `megazero
profile` writes. Each key ends with its unit. A TFLOP is 10^12 FLOPs, a GB 10^9 bytes, a GiB 2^30 bytes and a
Gbit an eighth of a GB. The rate of a link is the rate in one direction.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megazero.errors import ConfigError
from megazero.plan.hardware import BetweenNodes, Compute, Curve, HostMachine, InsideNode, Memory, Strict
from megazero.regular_file import read_regular_text, why_unreadable

_FOLDER = Path(__file__).with_name("devices")
_PARTS = frozenset(("compute", "memory", "inside_node", "between_nodes", "host", "sources"))
_LINK_GB_PER_S = (20, 25, 25, 25, 50)
"""The rate of one NVLink link in one direction, by generation from the first; the second is V100's."""


@dataclass(frozen=True)
class Device(Strict):
    """All that a plan knows of a device; `sources` says where each key, or each part, is from."""

    name: str
    compute: Compute
    memory: Memory
    inside_node: InsideNode
    between_nodes: BetweenNodes
    host: HostMachine
    sources: dict[str, str]

    @classmethod
    def load(cls, name: str | Path) -> Device:
        """Read the known device `name`, or the file `name`.

        Raises:
            ConfigError: there is no such device or file; or keys are missing, unknown, without a source or
                implausible, all of which are listed.
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
    def of(cls, document: Mapping[str, object], where: str = "the device") -> Device:
        """Read a device from a document, which errors call `where`.

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
        document: dict[str, object] = TypeAdapter(Device).dump_python(self, mode="json")
        return document

    @property
    def allocator_bytes(self) -> int:
        """The bytes that torch's allocator can use."""
        return int((self.memory.size_gib - self.memory.outside_allocator_gib) * 2**30)

    def peak_flop_per_s(self, dtype: str) -> float:
        """The peak rate of matrix products of a dtype.

        Raises:
            ConfigError: the device has no rate for the dtype.
        """
        if dtype not in self.compute.peak_tflop_per_s:
            raise ConfigError(
                f"The dtype must be one that {self.name} multiplies "
                f"({', '.join(self.compute.peak_tflop_per_s)}), but is {dtype}; choose another device"
            )
        return self.compute.peak_tflop_per_s[dtype] * 1e12

    def with_nic(self, gbit_per_s_per_rank: float) -> Device:
        """The device in nodes with other NICs, assuming that curves keep their shape."""
        old = self.between_nodes
        by = gbit_per_s_per_rank / old.nic_gbit_per_s_per_rank
        links = BetweenNodes(gbit_per_s_per_rank, old.collective.scaled(by), old.message.scaled(by))
        return replace(self, between_nodes=links)

    def without_nvls(self) -> Device:
        """The device without sums in the switch: all-reduces are rings at reduce-scatter's bus bandwidth."""
        tables = self.inside_node.collectives
        tables = {**tables, "all_reduce": _ring(tables)} if self.inside_node.nvls_from_ranks else tables
        return replace(self, inside_node=replace(self.inside_node, collectives=tables, nvls_from_ranks=0))


def known_devices() -> list[str]:
    """The names of the devices that come with the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def _ring(tables: Mapping[str, Mapping[int, Curve]]) -> dict[int, Curve]:
    """Curves of ring all-reduces: the latencies of all-reduces, the bus bandwidths of reduce-scatters."""
    alphas = {ranks: curve.alpha_us for ranks, curve in tables["all_reduce"].items()}
    rings = tables["reduce_scatter"]
    return {
        ranks: replace(rings[ranks], alpha_us=alphas.get(ranks, rings[ranks].alpha_us)) for ranks in rings
    }


def _document(path: Path) -> dict[str, object]:
    """Read a file; if it has the key `like`, its keys replace those of that known device."""
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


def _laid_over(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    """`below` with the keys of `above`; the keys of a part are replaced one by one."""
    merged = dict(below)
    for key, new in above.items():
        old = below.get(key) if key in _PARTS else None
        merged[key] = {**old, **new} if isinstance(old, dict) and isinstance(new, dict) else new
    return merged


def _violation(where: str, problem: Mapping[str, Any]) -> str:
    key = ".".join(str(part) for part in problem["loc"] if part != "[key]") or "the document"
    if problem["type"] == "missing":
        return f"{where}: `{key}` must be there, but is missing; add it"
    if problem["type"] == "unexpected_keyword_argument":
        return f"{where}: `{key}` must be a key of a device, but is not; remove it, or correct its unit"
    return f"{where}: `{key}` is refused, {problem['msg'].lower()}, but is {problem['input']!r}; correct it"


def _without_source(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each figure that `sources` does not name."""
    sources = document["sources"]
    for part in sorted(_PARTS - {"sources"}):
        for key, value in document[part].items():
            if not isinstance(value, bool) and part not in sources and f"{part}.{key}" not in sources:
                yield f"`sources` must say where `{part}.{key}` is from, but does not; add it"


def _implausible(device: Device) -> Iterator[str]:
    """Yield a sentence for each number that is physically impossible, most often for a wrong unit."""
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
