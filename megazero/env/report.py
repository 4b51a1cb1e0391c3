"""The report on an environment, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict

from megazero.env.facts import Environment, OperatorRow
from megazero.env.node import GPU_COLUMNS, UNLIMITED, GpuState
from megazero.env.problems import find_problems
from megazero.train.observe.host import giga


def document(env: Environment) -> dict[str, object]:
    """All facts and problems as a JSON object."""
    return {**asdict(env), "problems": [asdict(problem) for problem in find_problems(env)]}


def report(env: Environment) -> str:
    """The report as text; it leaves out implementations of operators for another device."""
    sections = (
        ("versions", _versions(env)),
        ("devices", _devices(env)),
        ("memory and disk", _memory(env)),
        ("cores and threads", _processors(env)),
        ("network", _network(env)),
        ("node", _node(env)),
        ("compiled modules", ((module.name, module.trouble or "built") for module in env.modules)),
        *((f"operators on {device}", _operators(env, device)) for device in ("cpu", "cuda")),
        ("environment variables", env.variables.items()),
    )
    lines: list[str] = []
    for title, rows in sections:
        lines += [title, *_table(rows), ""]
    problems = find_problems(env)
    lines.append(f"problems: {len(problems) or 'none found'}")
    lines += [f"  {problem}" for problem in problems]
    return "\n".join(lines)


def _table(rows: Iterable[tuple[str, str]]) -> list[str]:
    rows = list(rows) or [("", "none")]
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value}".rstrip() for name, value in rows]


def _versions(env: Environment) -> Iterator[tuple[str, str]]:
    versions = env.versions
    yield "megazero", versions.megazero
    yield "python", versions.python
    yield "torch", versions.torch
    yield "numpy", versions.numpy
    yield "torch's CUDA", versions.cuda or "none: torch is built without it"
    yield "driver's CUDA", versions.driver or "none: no driver was found"
    yield "NCCL", versions.nccl or "none"
    yield "Gloo", "torch's" if versions.gloo else "none"
    yield "nvcc", versions.nvcc or "none"
    yield "C++ compiler", versions.compiler or "none"
    yield "ninja", versions.ninja or "none"
    yield "apex", {"absent": "none", "nvidia": "NVIDIA's", "other": "another package"}[env.apex]
    yield from versions.packages.items()


def _devices(env: Environment) -> Iterator[tuple[str, str]]:
    for number, gpu in enumerate(env.gpus):
        major, minor = gpu.capability
        yield f"GPU {number}", f"{gpu.name}, compute capability {major}.{minor}, {_gib(gpu.memory)}"
    if not env.gpus:
        yield "CPU", "no CUDA device: training runs on the CPU"


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"


def _memory(env: Environment) -> Iterator[tuple[str, str]]:
    memory = env.memory
    yield "memory", f"{_gib(memory.total)}, {_gib(memory.available)} available"
    yield "limit of the control group", "none" if memory.limit is None else _gib(memory.limit)
    if memory.shared is None:
        yield "/dev/shm", "none"
    else:
        yield "/dev/shm", f"{_gib(memory.shared)}, {_gib(memory.shared_free)} free"
    yield "free on this folder's disk", _gib(memory.disk_free)


def _processors(env: Environment) -> Iterator[tuple[str, str]]:
    processors = env.processors
    yield "cores", f"{processors.cores}, {processors.usable} of them usable"
    yield "limit of the control group", "none" if processors.quota is None else f"{processors.quota:g} cores"
    yield "ranks on this host", str(env.ranks)
    yield "OMP_NUM_THREADS", processors.omp_threads or "not set"
    yield "torch's threads", str(processors.threads)
    if processors.load is not None:
        yield "load of the last minute", f"{processors.load:.1f}"
    for precision, rate in processors.rates.items():
        yield f"products in {precision}", f"{giga(rate)} GFLOP/s"


def _network(env: Environment) -> Iterator[tuple[str, str]]:
    yield from env.interfaces.items()
    for number, line in enumerate((env.topology or "").splitlines()):
        yield "" if number else "GPU topology", line


def _node(env: Environment) -> Iterator[tuple[str, str]]:
    node, kernel = env.node, env.node.kernel
    yield "kernel", kernel.release or "unknown"
    yield "sources of megazero", node.code or "unknown"
    limits = {
        "open files": node.limits.files,
        "processes": node.limits.processes,
        "locked memory": node.limits.locked,
    }
    yield "limits", ", ".join(f"{name} {_limit(value)}" for name, value in limits.items())
    yield "governor of cores", ", ".join(kernel.governors) or "unknown"
    moves = "moves pages" if kernel.numa_balancing else "moves no pages"
    yield "domains of memory", f"{kernel.numa_nodes}, the kernel {moves}"
    yield "transparent huge pages", kernel.huge_pages or "unknown"
    if kernel.modules:
        yield "kernel modules", " ".join(kernel.modules)
    for gpu, (active, inactive) in node.nvlinks.items():
        yield f"NVLinks of GPU {gpu}", f"{active} active, {inactive} inactive"
    for gpu_state in node.gpus:
        yield f"GPU {gpu_state.index}", _gpu_state(gpu_state)


def _limit(value: int) -> str:
    return "unlimited" if value == UNLIMITED else str(value)


def _gpu_state(gpu: GpuState) -> str:
    known = {name: gpu.values.get(name) or "unknown" for name in GPU_COLUMNS}
    lanes = f"PCIe {known['pcie.link.gen.max']} x{known['pcie.link.width.current']}"
    power = f"{known['power.limit']} of {known['power.default_limit']} W"
    errors = f"{known['ecc.errors.uncorrected.volatile.total']} memory errors"
    return (
        f"driver {known['driver_version']}, {lanes}, SM up to {known['clocks.max.sm']} MHz, {power}, {errors}"
    )


def _operators(env: Environment, device: str) -> Iterator[tuple[str, str]]:
    if device == "cuda" and not env.gpus:
        yield "", "(as it would be: there is no device)"
    last = None
    for row in env.operators:
        if row.device == device:
            name = row.operator + (f", {row.kind}" if row.kind else "")
            yield "" if name == last else name, _choice(row)
            last = name


def _choice(row: OperatorRow) -> str:
    other = {"cpu": "serves cuda only", "cuda": "serves cpu only"}[row.device]
    reasons = [f"{name} {reason}" for name, reason in row.passed_over if reason != other]
    why = f"; {', '.join(reasons)}" if reasons else ""
    return f"{row.chosen} ({', '.join(row.dtypes)}){why}"
