"""The facts about a node of a cluster: state of the GPUs, links, ports, limits and kernel.

`node_facts` reads them from a file system and from `nvidia-smi`; parsers of their outputs take text.
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
"""The queried values of a GPU, by the names of ``nvidia-smi --help-query-gpu``."""

_MODULES = re.compile(r"nvidia|nv_peer|gdrdrv|amdgpu|ib_|rdma|mlx|efa|bnxt")


def gpu_query(columns: Sequence[str] = GPU_COLUMNS) -> tuple[str, ...]:
    """The command whose output `gpu_states` parses."""
    return ("nvidia-smi", f"--query-gpu={','.join(columns)}", "--format=csv,nounits")


LINKS = ("nvidia-smi", "nvlink", "--status")
"""The command whose output `nvlink_counts` parses."""


@dataclass(frozen=True)
class GpuState:
    """The state of a GPU, from the driver. values: the known values, by the names of `GPU_COLUMNS`."""

    index: int
    values: Mapping[str, str] = field(default_factory=dict)

    def number(self, name: str) -> float | None:
        """A value as a number; None if it is not a number, such as "[N/A]"."""
        with suppress(ValueError):
            return float(self.values.get(name, ""))
        return None


@dataclass(frozen=True)
class Port:
    """A port of an RDMA device.

    Attributes:
        name: such as "mlx5_0 port 1".
        state: such as "ACTIVE" or "DOWN".
        rate: in Gb/s; 0 if unknown.
        layer: "InfiniBand" or "Ethernet".
    """

    name: str
    state: str
    rate: float
    layer: str


@dataclass(frozen=True)
class ProcessLimits:
    """The limits of a process: open files, processes, and locked memory in bytes; -1 for none."""

    files: int = UNLIMITED
    processes: int = UNLIMITED
    locked: int = UNLIMITED


@dataclass(frozen=True)
class KernelFacts:
    """The operating system's kernel and its settings.

    Attributes:
        release: the version of the kernel.
        governors: the CPU frequency governors.
        numa_nodes: the number of NUMA nodes.
        numa_balancing: whether the kernel moves pages between NUMA nodes.
        huge_pages: the mode of transparent huge pages, such as "madvise".
        command_line: the kernel's command line.
        modules: loaded modules for GPUs and networks.
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
    """The facts about a node that matter to a job of several nodes.

    Attributes:
        code: a digest of megazero's sources.
        limits: the resource limits of this process.
        gpus: the state of each GPU.
        nvlinks: GPU index -> numbers of active and of inactive links.
        ports: the ports of RDMA devices.
        kernel: the kernel and its settings.
    """

    code: str = ""
    limits: ProcessLimits = ProcessLimits()
    gpus: tuple[GpuState, ...] = ()
    nvlinks: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    ports: tuple[Port, ...] = ()
    kernel: KernelFacts = KernelFacts()


def gpu_states(text: str) -> tuple[GpuState, ...]:
    """Parse the output of `gpu_query`, dropping the units in its header."""
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
    """Parse ``nvidia-smi nvlink --status`` into GPU index -> numbers of active and inactive links."""
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
    """The ports in ``sys/class/infiniband``, whose files hold "4: ACTIVE" and "400 Gb/sec (4X NDR)"."""
    ports = []
    for folder in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        state = _text(folder / "state").partition(":")[2].strip()
        rate = re.match(r"[\d.]+", _text(folder / "rate"))
        name = f"{folder.parent.parent.name} port {folder.name}"
        ports.append(Port(name, state, float(rate[0]) if rate else 0.0, _text(folder / "link_layer")))
    return tuple(ports)


def chosen_word(text: str) -> str:
    """The word in brackets, such as "madvise" in "always [madvise] never"."""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else ""


def own_limits() -> ProcessLimits:
    """The limits of this process."""
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK)
    soft = [resource.getrlimit(kind)[0] for kind in kinds]
    return ProcessLimits(*(UNLIMITED if limit == resource.RLIM_INFINITY else limit for limit in soft))


def node_facts(
    output: Callable[..., str | None], code: str, root: Path = Path("/"), limits: ProcessLimits | None = None
) -> NodeFacts:
    """Read the facts about a node.

    Args:
        output: runs a command and returns its output, None if it fails.
        code: a digest of megazero's sources.
        root: the folder with the ``proc`` and ``sys`` to read.
        limits: the resource limits; by default those of this process.
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
    """The facts about the kernel in ``proc`` and ``sys`` below `root`."""
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
    """The stripped content of a file; empty if it cannot be read."""
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""
