"""The facts about a machine, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megazero.env.node import NodeFacts
from megazero.ops.dispatch import Operator


@dataclass(frozen=True)
class Versions:
    """The versions of the software that megazero runs on; None for what is absent.

    Attributes:
        cuda: CUDA version that torch is built for.
        driver: the newest CUDA version that the installed driver runs.
        nvcc: CUDA version of the toolkit.
        packages: versions of optional packages, by name.
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
        capability: compute capability, such as (9, 0).
        memory: bytes.
    """

    name: str
    capability: tuple[int, int]
    memory: int


@dataclass(frozen=True)
class CompiledModule:
    """An extension module or library; `trouble` is the reason why it cannot be used, None if it can."""

    name: str
    trouble: str | None = None
    remedy: str = "install a C++17 compiler and run `pip install -e .`"


@dataclass(frozen=True)
class HostMemory:
    """The memory and disk of a host in bytes; None where the system does not say.

    Attributes:
        limit: the control group's limit, None if it sets none.
        shared, shared_free: size of /dev/shm, and the free part of it.
        disk_free: free bytes of the disk with the current folder.
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
        cores: cores of the machine.
        usable: cores that this process may run on.
        quota: cores' worth of time that the control group grants; None if it sets no limit.
        threads: threads of torch's operators.
        omp_threads: the value of OMP_NUM_THREADS, None if it is not set.
        load: processes that wanted to run in the last minute, on average; None where the system does not say.
        rates: FLOP/s of matrix products by precision.
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
    """The implementation that computes an operator for calls of one kind.

    Attributes:
        device: ``cpu`` or ``cuda``.
        kind: further facts of the call that change the choice, such as ``dropout=True``; may be empty.
        dtypes: all dtypes for which the rest of the row is the same.
        passed_over: the implementations that come before the chosen one, each with the reason why it does not
            run.
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
        ranks: processes that are to run on this host.
        gpus: the GPUs that torch sees.
        driver_gpus: names of the GPUs that the driver lists.
        torch_targets: compute capabilities that torch is built for.
        apex: the package that is installed under that name: ``absent``, ``nvidia`` or ``other``.
        writes_bytecode: whether Python keeps the modules that it compiles.
        interfaces: network interfaces by name, each with its state and speed.
        topology: the output of ``nvidia-smi topo -m``; None if there is none.
        variables: environment variables that bear on a training.
        node: what matters to a job of several nodes.
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


def operator_rows(operator: Operator[Any]) -> tuple[OperatorRow, ...]:
    """The implementation for each kind of call, and why no faster one runs; like calls share a row."""
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
