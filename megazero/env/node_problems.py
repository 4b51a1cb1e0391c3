"""The problems of a node of a cluster: links, ports, limits, clocks and the kernel's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megazero.env.facts import Environment
from megazero.env.nccl import variable_problems
from megazero.env.node import UNLIMITED, GpuState
from megazero.env.trouble import Trouble

SHARED_BYTES = 512 << 20
"""Bytes of /dev/shm below which NCCL and data loaders run out; DeepSpeed's report warns at the same size."""

FEW_FILES = 4096
FEW_PROCESSES = 4096

_PORT_UP = "ACTIVE"


def _shared_memory(env: Environment) -> Iterator[Trouble]:
    size = env.memory.shared
    if env.ranks > 1 and size is not None and size < SHARED_BYTES:
        yield Trouble(
            "shm_small",
            f"/dev/shm must have 512 MiB for {env.ranks} ranks, but has {size >> 20} MiB",
            "start the container with `docker run --ipc=host` or `docker run --shm-size=16g`",
            stops=bool(env.gpus),
        )


def _limits(env: Environment) -> Iterator[Trouble]:
    limits = env.node.limits
    for name, what, flag, value, least in (
        ("few_files", "open files", "-n", limits.files, FEW_FILES),
        ("few_processes", "processes and threads", "-u", limits.processes, FEW_PROCESSES),
    ):
        if value != UNLIMITED and value < least:
            yield Trouble(
                name,
                f"the limit of {what} must be at least {least}, but is {value}",
                f"run `ulimit {flag} 65536`, and set it in /etc/security/limits.conf",
            )
    locked = limits.locked
    if env.node.ports and locked != UNLIMITED:
        yield Trouble(
            "memlock_limited",
            "the limit of locked memory must be unlimited where RDMA devices register buffers, but is "
            f"{locked >> 10} KiB",
            "run `ulimit -l unlimited`, or `docker run --ulimit memlock=-1` for a container",
            stops=True,
        )


def _nvlinks(env: Environment) -> Iterator[Trouble]:
    links = env.node.nvlinks
    most = max((active for active, _ in links.values()), default=0)
    for gpu, (active, inactive) in links.items():
        if most and active < most:
            yield Trouble(
                "nvlink_inactive",
                f"GPU {gpu} must have {most} active NVLinks, as others here, but has {active} and {inactive} "
                "inactive",
                "look at `nvidia-smi nvlink --status` and at the fabric manager's log, and reset the GPU",
            )


def _ports(env: Environment) -> Iterator[Trouble]:
    up = [port for port in env.node.ports if port.state == _PORT_UP]
    for port in env.node.ports:
        if port.state != _PORT_UP and up:
            yield Trouble(
                "port_down",
                f"{port.name} must be ACTIVE, as others here, but is {port.state or 'in no known state'}",
                "look at its cable and switch, or leave it out by NCCL_IB_HCA",
            )
    fastest = max((port.rate for port in up), default=0.0)
    for port in up:
        if port.rate < fastest and port.layer == "InfiniBand":
            yield Trouble(
                "port_slow",
                f"{port.name} must run at {fastest:g} Gb/s, as others here, but runs at {port.rate:g}",
                "look at its cable and switch, or leave it out by NCCL_IB_HCA",
            )
    if env.node.ports and not up:
        yield Trouble(
            "no_port_up",
            f"a port of the {len(env.node.ports)} RDMA devices must be ACTIVE, but none is",
            "start the subnet manager or look at the cables; until then messages between nodes go over TCP",
        )
    direct = {"nvidia_peermem", "nv_peer_mem"} & {*env.node.kernel.modules}
    if env.gpus and up and env.node.kernel.modules and not direct:
        yield Trouble(
            "no_peermem",
            "nvidia_peermem must be loaded for NICs to read GPUs' memory, unless the driver offers dma-buf, "
            "but is not",
            "run `modprobe nvidia_peermem`, and look for GDRDMA in the lines of NCCL_DEBUG=INFO",
        )


def _gpu_states(env: Environment) -> Iterator[Trouble]:
    for gpu in env.node.gpus:
        yield from _gpu_state(gpu)
    clocks = {clock for gpu in env.node.gpus if (clock := gpu.number("clocks.max.sm")) is not None}
    if len(clocks) > 1:
        listed = ", ".join(f"{clock:g}" for clock in sorted(clocks))
        yield Trouble(
            "gpus_differ",
            f"the GPUs of a host must have one maximal clock, but have {listed} MHz",
            "look at `nvidia-smi -q -d CLOCK`, and reset locked clocks with -rgc: all wait for the slowest",
        )


def _gpu_state(gpu: GpuState) -> Iterator[Trouble]:
    name, values = f"GPU {gpu.index}", gpu.values
    width, widest = gpu.number("pcie.link.width.current"), gpu.number("pcie.link.width.max")
    if width and widest and width < widest:
        yield Trouble(
            "pcie_narrow",
            f"{name} must have {widest:g} lanes of PCIe, but has {width:g}",
            "seat it again, or look at the slot and its riser",
        )
    limit, default = gpu.number("power.limit"), gpu.number("power.default_limit")
    if limit and default and limit < default:
        yield Trouble(
            "power_capped",
            f"{name} must be allowed its {default:g} W, but is limited to {limit:g} W",
            f"run `nvidia-smi -i {gpu.index} -pl {default:g}` unless the limit is wanted: clocks follow it",
        )
    if values.get("clocks_throttle_reasons.hw_slowdown") == "Active":
        yield Trouble(
            "gpu_slowed",
            f"{name} must run at its clocks, but its hardware slows it down",
            "look at its temperature and power supply: `nvidia-smi -q -d PERFORMANCE`",
        )
    errors = gpu.number("ecc.errors.uncorrected.volatile.total")
    if errors:
        yield Trouble(
            "ecc_errors",
            f"{name} must have no uncorrected memory error since its start, but has {errors:g}",
            f"run `nvidia-smi --gpu-reset -i {gpu.index}`, and have it replaced if they come back",
            stops=True,
        )
    if values.get("remapped_rows.pending", "").lower() in ("yes", "1"):
        yield Trouble(
            "rows_to_remap",
            f"{name} must have no rows of memory that wait to be remapped, but has some",
            f"run `nvidia-smi --gpu-reset -i {gpu.index}` before the training",
            stops=True,
        )
    if values.get("persistence_mode") == "Disabled":
        yield Trouble(
            "persistence_off",
            f"{name} must stay initialized between processes, but persistence mode is off",
            "run `nvidia-smi -pm 1`: each start of a rank otherwise takes seconds",
        )
    if values.get("mig.mode.current") == "Enabled":
        yield Trouble(
            "mig_on",
            f"{name} must be whole, but MIG is on: ranks see slices, between which NCCL does not communicate",
            f"run `nvidia-smi -i {gpu.index} -mig 0`",
            stops=True,
        )


def _kernel(env: Environment) -> Iterator[Trouble]:
    kernel = env.node.kernel
    slow = sorted(set(kernel.governors) - {"performance"})
    if slow:
        yield Trouble(
            "governor",
            f"cores must run under the governor performance, but run under {', '.join(slow)}",
            "run `cpupower frequency-set -g performance`",
        )
    if kernel.numa_balancing and kernel.numa_nodes > 1:
        yield Trouble(
            "numa_balancing",
            f"the kernel must leave pages in their domain of memory ({kernel.numa_nodes} here), but moves "
            "them",
            "run `sysctl kernel.numa_balancing=0`: ranks stall while their pages are unmapped",
        )
    if kernel.huge_pages == "never":
        yield Trouble(
            "no_huge_pages",
            "transparent huge pages must be madvise or always for large tensors of the host, but are never",
            "run `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`",
        )
    words = kernel.command_line.split()
    if env.gpus and {"intel_iommu=on", "amd_iommu=on"} & set(words) and "iommu=pt" not in words:
        yield Trouble(
            "iommu",
            "the IOMMU must pass addresses through (iommu=pt) where GPUs talk to each other, but does not",
            "add iommu=pt to the kernel's command line, or turn the IOMMU off",
        )


NODE_LOOKS: tuple[Callable[[Environment], Iterator[Trouble]], ...] = (
    _shared_memory,
    _limits,
    _nvlinks,
    _ports,
    _gpu_states,
    _kernel,
    variable_problems,
)
"""One function per kind of problem."""
