"""The problems of a node of a cluster: links, ports, limits, clocks and kernel settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megazero.env.facts import Environment, Problem
from megazero.env.nccl import variable_problems
from megazero.env.node import UNLIMITED, GpuState

SHARED_BYTES = 512 << 20
"""The least size of /dev/shm for NCCL and data loaders in bytes; DeepSpeed's report has the same."""

FEW_FILES = 4096
FEW_PROCESSES = 4096

_PORT_UP = "ACTIVE"


def _shared_memory(env: Environment) -> Iterator[Problem]:
    size = env.memory.shared
    if env.ranks > 1 and size is not None and size < SHARED_BYTES:
        yield Problem(
            "shm_small",
            f"/dev/shm must have 512 MiB for {env.ranks} ranks, but has {size >> 20} MiB",
            "start the container with `docker run --ipc=host` or `docker run --shm-size=16g`",
            stops=bool(env.gpus),
        )


def _limits(env: Environment) -> Iterator[Problem]:
    limits = env.node.limits
    for name, what, flag, value, least in (
        ("few_files", "open files", "-n", limits.files, FEW_FILES),
        ("few_processes", "processes and threads", "-u", limits.processes, FEW_PROCESSES),
    ):
        if value != UNLIMITED and value < least:
            yield Problem(
                name,
                f"the limit of {what} must be at least {least}, but is {value}",
                f"run `ulimit {flag} 65536`, and set it in /etc/security/limits.conf",
            )
    locked = limits.locked
    if env.node.ports and locked != UNLIMITED:
        yield Problem(
            "memlock_limited",
            "the limit of locked memory must be unlimited where RDMA devices register buffers, but is "
            f"{locked >> 10} KiB",
            "run `ulimit -l unlimited`, or `docker run --ulimit memlock=-1` for a container",
            stops=True,
        )


def _nvlinks(env: Environment) -> Iterator[Problem]:
    links = env.node.nvlinks
    most = max((active for active, _ in links.values()), default=0)
    for gpu, (active, inactive) in links.items():
        if most and active < most:
            yield Problem(
                "nvlink_inactive",
                f"GPU {gpu} must have {most} active NVLinks, as others here, but has {active} and {inactive} "
                "inactive",
                "look at `nvidia-smi nvlink --status` and at the fabric manager's log, and reset the GPU",
            )


def _ports(env: Environment) -> Iterator[Problem]:
    up = [port for port in env.node.ports if port.state == _PORT_UP]
    for port in env.node.ports:
        if port.state != _PORT_UP and up:
            yield Problem(
                "port_down",
                f"{port.name} must be ACTIVE, as others here, but is {port.state or 'in no known state'}",
                "look at its cable and switch, or leave it out by NCCL_IB_HCA",
            )
    fastest = max((port.rate for port in up), default=0.0)
    for port in up:
        if port.rate < fastest and port.layer == "InfiniBand":
            yield Problem(
                "port_slow",
                f"{port.name} must run at {fastest:g} Gb/s, as others here, but runs at {port.rate:g}",
                "look at its cable and switch, or leave it out by NCCL_IB_HCA",
            )
    if env.node.ports and not up:
        yield Problem(
            "no_port_up",
            f"a port of the {len(env.node.ports)} RDMA devices must be ACTIVE, but none is",
            "start the subnet manager or look at the cables; until then messages between nodes go over TCP",
        )
    direct = {"nvidia_peermem", "nv_peer_mem"} & {*env.node.kernel.modules}
    if env.gpus and up and env.node.kernel.modules and not direct:
        yield Problem(
            "no_peermem",
            "nvidia_peermem must be loaded for NICs to read GPUs' memory, unless the driver offers dma-buf, "
            "but is not",
            "run `modprobe nvidia_peermem`, and look for GDRDMA in the lines of NCCL_DEBUG=INFO",
        )


def _gpu_states(env: Environment) -> Iterator[Problem]:
    for gpu in env.node.gpus:
        yield from _slow_gpu(gpu)
        yield from _unfit_gpu(gpu)
    clocks = {clock for gpu in env.node.gpus if (clock := gpu.number("clocks.max.sm")) is not None}
    if len(clocks) > 1:
        listed = ", ".join(f"{clock:g}" for clock in sorted(clocks))
        yield Problem(
            "gpus_differ",
            f"the GPUs of a host must have one maximal clock, but have {listed} MHz",
            "look at `nvidia-smi -q -d CLOCK`, and reset locked clocks with -rgc: all wait for the slowest",
        )


def _slow_gpu(gpu: GpuState) -> Iterator[Problem]:
    name = f"GPU {gpu.index}"
    width, widest = gpu.number("pcie.link.width.current"), gpu.number("pcie.link.width.max")
    if width and widest and width < widest:
        yield Problem(
            "pcie_narrow",
            f"{name} must have {widest:g} lanes of PCIe, but has {width:g}",
            "seat it again, or look at the slot and its riser",
        )
    limit, default = gpu.number("power.limit"), gpu.number("power.default_limit")
    if limit and default and limit < default:
        yield Problem(
            "power_capped",
            f"{name} must be allowed its {default:g} W, but is limited to {limit:g} W",
            f"run `nvidia-smi -i {gpu.index} -pl {default:g}` unless the limit is wanted: clocks follow it",
        )
    if gpu.values.get("clocks_throttle_reasons.hw_slowdown") == "Active":
        yield Problem(
            "gpu_slowed",
            f"{name} must run at its clocks, but its hardware slows it down",
            "look at its temperature and power supply: `nvidia-smi -q -d PERFORMANCE`",
        )


def _unfit_gpu(gpu: GpuState) -> Iterator[Problem]:
    name, values = f"GPU {gpu.index}", gpu.values
    errors = gpu.number("ecc.errors.uncorrected.volatile.total")
    if errors:
        yield Problem(
            "ecc_errors",
            f"{name} must have no uncorrected memory error since its start, but has {errors:g}",
            f"run `nvidia-smi --gpu-reset -i {gpu.index}`, and have it replaced if they come back",
            stops=True,
        )
    if values.get("remapped_rows.pending", "").lower() in ("yes", "1"):
        yield Problem(
            "rows_to_remap",
            f"{name} must have no rows of memory that wait to be remapped, but has some",
            f"run `nvidia-smi --gpu-reset -i {gpu.index}` before the training",
            stops=True,
        )
    if values.get("persistence_mode") == "Disabled":
        yield Problem(
            "persistence_off",
            f"{name} must stay initialized between processes, but persistence mode is off",
            "run `nvidia-smi -pm 1`: each start of a rank otherwise takes seconds",
        )
    if values.get("mig.mode.current") == "Enabled":
        yield Problem(
            "mig_on",
            f"{name} must be whole, but MIG is on: ranks see slices, between which NCCL does not communicate",
            f"run `nvidia-smi -i {gpu.index} -mig 0`",
            stops=True,
        )


def _kernel(env: Environment) -> Iterator[Problem]:
    kernel = env.node.kernel
    slow = sorted(set(kernel.governors) - {"performance"})
    if slow:
        yield Problem(
            "governor",
            f"cores must run under the governor performance, but run under {', '.join(slow)}",
            "run `cpupower frequency-set -g performance`",
        )
    if kernel.numa_balancing and kernel.numa_nodes > 1:
        yield Problem(
            "numa_balancing",
            f"the kernel must leave pages in their domain of memory ({kernel.numa_nodes} here), but moves "
            "them",
            "run `sysctl kernel.numa_balancing=0`: ranks stall while their pages are unmapped",
        )
    if kernel.huge_pages == "never":
        yield Problem(
            "no_huge_pages",
            "transparent huge pages must be madvise or always for large tensors of the host, but are never",
            "run `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`",
        )
    words = kernel.command_line.split()
    if env.gpus and {"intel_iommu=on", "amd_iommu=on"} & set(words) and "iommu=pt" not in words:
        yield Problem(
            "iommu",
            "the IOMMU must pass addresses through (iommu=pt) where GPUs talk to each other, but does not",
            "add iommu=pt to the kernel's command line, or turn the IOMMU off",
        )


NODE_CHECKS: tuple[Callable[[Environment], Iterator[Problem]], ...] = (
    _shared_memory,
    _limits,
    _nvlinks,
    _ports,
    _gpu_states,
    _kernel,
    variable_problems,
)
"""A function for each kind of problem."""
