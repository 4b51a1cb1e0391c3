"""The facts about a machine, and its problems, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megazero.env.node import NodeFacts
from megazero.ops.dispatch import Operator


@dataclass(frozen=True)
class Versions:
    """The versions of the software that megazero runs on; None for software that is absent.

    Attributes:
        cuda: the CUDA version that torch is built for.
        driver: the newest CUDA version that the installed driver runs.
        nvcc: the CUDA version of the toolkit.
        packages: the versions of optional packages, by name.
    """

    megazero: str
    python: str
    torch: str
    numpy: str
    cuda: str | None = None
    driver: str | None = None
    nccl: str | None = None
    gloo: bool = True
    nvcc: str | None = None
    compiler: str | None = None
    ninja: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AcceleratorFacts:
    """One GPU.

    Attributes:
        capability: the compute capability, such as (9, 0).
        memory: in bytes.
    """

    name: str
    capability: tuple[int, int]
    memory: int


@dataclass(frozen=True)
class CompiledModule:
    """An extension module or library. trouble: why it cannot be used, None if it can."""

    name: str
    trouble: str | None = None
    remedy: str = "install a C++17 compiler and run `pip install -e .`"


@dataclass(frozen=True)
class HostMemory:
    """The memory and disk of a host in bytes; None if unknown.

    Attributes:
        limit: the limit of the control group, None if there is none.
        shared, shared_free: the size of /dev/shm, and its free part.
        disk_free: the free part of the disk with the current folder.
    """

    total: int | None
    available: int | None
    limit: int | None = None
    shared: int | None = None
    shared_free: int | None = None
    disk_free: int | None = None


@dataclass(frozen=True)
class Processors:
    """The cores and threads of a host.

    Attributes:
        cores: the cores of the machine.
        usable: the cores that this process may run on.
        quota: the CPU time that the control group grants, in cores; None without a limit.
        threads: the threads of torch's operators.
        omp_threads: the value of OMP_NUM_THREADS, None if it is not set.
        load: the load average of the last minute; None if unknown.
        rates: FLOP/s of matrix products, by precision.
    """

    cores: int
    usable: int
    quota: float | None
    threads: int
    omp_threads: str | None
    load: float | None = None
    rates: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class OperatorRow:
    """The implementation that is chosen for calls of one kind to an operator.

    Attributes:
        device: "cpu" or "cuda". kind: further facts of the call that change the choice, such as
        "dropout=True"; may be empty. dtypes: all dtypes with the same choice. passed_over: the
        implementations that precede the chosen one, each with the reason why it does not run.
    """

    operator: str
    device: str
    kind: str
    dtypes: tuple[str, ...]
    chosen: str
    passed_over: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Environment:
    """All facts about a machine.

    Attributes:
        ranks: the number of ranks of a training on this host.
        gpus: the GPUs that torch sees.
        driver_gpus: the names of the GPUs that the driver lists.
        torch_targets: the compute capabilities that torch is built for.
        apex: the package with the name apex: "absent", "nvidia" or "other".
        writes_bytecode: whether Python keeps the modules that it compiles.
        interfaces: the network interfaces by name, with state and speed.
        topology: the output of ``nvidia-smi topo -m``; None if the command fails.
        variables: the environment variables that affect a training.
        node: facts that matter to a job of several nodes.
    """

    versions: Versions
    memory: HostMemory
    processors: Processors
    ranks: int = 1
    gpus: tuple[AcceleratorFacts, ...] = ()
    driver_gpus: tuple[str, ...] = ()
    torch_targets: tuple[tuple[int, int], ...] = ()
    modules: tuple[CompiledModule, ...] = ()
    operators: tuple[OperatorRow, ...] = ()
    apex: str = "absent"
    writes_bytecode: bool = True
    interfaces: Mapping[str, str] = field(default_factory=dict)
    topology: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    node: NodeFacts = field(default_factory=NodeFacts)


@dataclass(frozen=True)
class Problem:
    """Something about a machine that stops a training or slows it down.

    Attributes:
        name: a short name, for machines.
        message: "`x` must be ..., but is ...".
        remedy: what to do.
        stops: whether a training would end with an error or hang.
    """

    name: str
    message: str
    remedy: str
    stops: bool = False

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy} [{self.name}]"


def operator_rows(operator: Operator[Any]) -> tuple[OperatorRow, ...]:
    """The implementation for each kind of call; calls with the same choice share a row."""
    groups: dict[tuple[str, str, str, tuple[tuple[str, str], ...]], list[str]] = {}
    for call, kind in operator.kinds().items():
        chosen = operator.choose(call).name
        key = (call.device, kind, chosen, operator.passed_over(call))
        dtypes = groups.setdefault(key, [])
        name = str(call.dtype).removeprefix("torch.")
        if name not in dtypes:
            dtypes.append(name)
    return tuple(
        OperatorRow(operator.name, device, kind, tuple(dtypes), chosen, passed_over)
        for (device, kind, chosen, passed_over), dtypes in sorted(
            groups.items(), key=lambda item: item[0][:2]
        )
    )
