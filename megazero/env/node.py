"""The facts of a node of a cluster: its GPUs' state, links, ports, limits and kernel, read from text.

`node_facts` reads them from a file system and from `nvidia-smi`; each parser takes a text of its own.
"""

from __future__ import annotations

import csv
import platform
import re
import resource
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

UNLIMITED = -1

_OLD_COLUMNS = (
    "index driver_version pcie.link.gen.max pcie.link.width.current pcie.link.width.max clocks.max.sm "
    "power.limit power.default_limit persistence_mode ecc.errors.uncorrected.volatile.total"
)
GPU_COLUMNS = tuple(
    f"{_OLD_COLUMNS} remapped_rows.pending mig.mode.current clocks_throttle_reasons.hw_slowdown".split()
)
"""What is asked of each GPU, by the names of ``nvidia-smi --help-query-gpu``."""

_MODULES = re.compile(r"nvidia|nv_peer|gdrdrv|amdgpu|ib_|rdma|mlx|efa|bnxt")


def gpu_query(columns: Sequence[str] = GPU_COLUMNS) -> tuple[str, ...]:
    """The command whose output `gpu_states` reads."""
    return ("nvidia-smi", f"--query-gpu={','.join(columns)}", "--format=csv,nounits")


LINKS = ("nvidia-smi", "nvlink", "--status")
"""The command whose output `nvlink_counts` reads."""


@dataclass(frozen=True)
class GpuState:
    """The state of a GPU as the driver tells it: what is known, by the names of `GPU_COLUMNS`."""

    index: int
    values: Mapping[str, str] = field(default_factory=dict)

    def number(self, name: str) -> float | None:
        """A value as a number; None if it is none, such as ``[N/A]``."""
        with suppress(ValueError):
            return float(self.values.get(name, ""))
        return None


@dataclass(frozen=True)
class Port:
    """A port of an RDMA device.

    Attributes:
        name: such as ``mlx5_0 port 1``.
        state: such as ``ACTIVE`` or ``DOWN``.
        rate: Gb/s; 0 if unknown.
        layer: ``InfiniBand`` or ``Ethernet``.
    """

    name: str
    state: str
    rate: float
    layer: str


@dataclass(frozen=True)
class Limits:
    """The limits of a process: open files, processes, and locked memory in bytes; -1 for none."""

    files: int = UNLIMITED
    processes: int = UNLIMITED
    locked: int = UNLIMITED


@dataclass(frozen=True)
class KernelFacts:
    """The operating system's kernel and its settings.

    Attributes:
        release: its version.
        governors: how cores choose their clocks.
        numa_nodes: domains of memory.
        numa_balancing: whether it moves pages between them.
        huge_pages: the choice for transparent huge pages, such as ``madvise``.
        command_line: the words that it was started with.
        modules: those of its modules that are about GPUs and networks.
    """

    release: str = ""
    governors: tuple[str, ...] = ()
    numa_nodes: int = 1
    numa_balancing: bool = False
    huge_pages: str = ""
    command_line: str = ""
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeFacts:
    """The facts of a node that matter to a job of several.

    Attributes:
        code: a digest of megazero's sources.
        limits: the limits of this process.
        gpus: the GPUs' state.
        nvlinks: for each GPU by its index, the numbers of active and of inactive links.
        ports: ports of RDMA devices.
        kernel: the kernel.
    """

    code: str = ""
    limits: Limits = Limits()
    gpus: tuple[GpuState, ...] = ()
    nvlinks: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    ports: tuple[Port, ...] = ()
    kernel: KernelFacts = KernelFacts()


def gpu_states(text: str) -> tuple[GpuState, ...]:
    """The rows of ``nvidia-smi --query-gpu=... --format=csv,nounits``, where units follow some names."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return ()
    rows = csv.DictReader([re.sub(r" \[[^\],]*\]", "", lines[0]), *lines[1:]], skipinitialspace=True)
    states = []
    for row in rows:
        values = {name: (value or "").strip() for name, value in row.items() if name}
        if values.get("index", "").isdigit():
            known = {name: value for name, value in values.items() if not value.startswith("[")}
            states.append(GpuState(int(values["index"]), known))
    return tuple(states)


def nvlink_counts(text: str) -> dict[int, tuple[int, int]]:
    """The active and inactive links of each GPU in the output of ``nvidia-smi nvlink --status``."""
    counts: dict[int, tuple[int, int]] = {}
    gpu = None
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            gpu = int(match[1])
        elif gpu is not None and (match := re.match(r"\s+Link \d+: (.+)", line)):
            active, inactive = counts.get(gpu, (0, 0))
            off = "inactive" in match[1].lower()
            counts[gpu] = (active + (not off), inactive + off)
    return counts


def rdma_ports(root: Path) -> tuple[Port, ...]:
    """The ports below ``sys/class/infiniband``, whose files say ``4: ACTIVE`` and ``400 Gb/sec (4X NDR)``."""
    ports = []
    for folder in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        state = _text(folder / "state").partition(":")[2].strip()
        rate = re.match(r"[\d.]+", _text(folder / "rate"))
        name = f"{folder.parent.parent.name} port {folder.name}"
        ports.append(Port(name, state, float(rate[0]) if rate else 0.0, _text(folder / "link_layer")))
    return tuple(ports)


def chosen_word(text: str) -> str:
    """The word in brackets: ``madvise`` of ``always [madvise] never``."""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else ""


def own_limits() -> Limits:
    """The limits of this process."""
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK)
    soft = [resource.getrlimit(kind)[0] for kind in kinds]
    return Limits(*(UNLIMITED if limit == resource.RLIM_INFINITY else limit for limit in soft))


def node_facts(
    output: Callable[..., str | None], code: str, root: Path = Path("/"), limits: Limits | None = None
) -> NodeFacts:
    """Read the facts of a node.

    Args:
        output: runs a command and returns its output, or None if it cannot.
        code: a digest of megazero's sources.
        root: the file system, whose ``proc`` and ``sys`` are read.
        limits: the limits; by default, this process's.
    """
    return NodeFacts(
        code=code,
        limits=limits or own_limits(),
        gpus=gpu_states(output(*gpu_query()) or output(*gpu_query(_OLD_COLUMNS.split())) or ""),
        nvlinks=nvlink_counts(output(*LINKS) or ""),
        ports=rdma_ports(root),
        kernel=kernel_facts(root),
    )


def kernel_facts(root: Path) -> KernelFacts:
    """The facts that a kernel tells in the file system below `root`."""
    cpus = root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
    modules = (line.partition(" ")[0] for line in _text(root / "proc/modules").splitlines())
    return KernelFacts(
        release=_text(root / "proc/sys/kernel/osrelease") or platform.release(),
        governors=tuple(sorted({_text(path) for path in cpus} - {""})),
        numa_nodes=max(1, len(list(root.glob("sys/devices/system/node/node[0-9]*")))),
        numa_balancing=_text(root / "proc/sys/kernel/numa_balancing") not in ("", "0"),
        huge_pages=chosen_word(_text(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        command_line=_text(root / "proc/cmdline"),
        modules=tuple(sorted(filter(_MODULES.match, modules))),
    )


def _text(path: Path) -> str:
    """The content of a file without spaces at its ends; empty if it cannot be read."""
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""
