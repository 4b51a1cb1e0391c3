"""Collects the facts about the machine that this process runs on."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

import numpy
import torch

from megazero.env.facts import (
    AcceleratorFacts,
    CompiledModule,
    Environment,
    HostMemory,
    Processors,
    Versions,
    operator_rows,
)
from megazero.env.node import node_facts
from megazero.kernels.build import BuildError
from megazero.mpu.cpu_cores import CGROUP, core_quota, load_average
from megazero.mpu.transports import backends
from megazero.ops import operators
from megazero.ops.cuda import cuda_library
from megazero.train.guards.agreement import code_digest
from megazero.train.observe.host import measure_matmul_rate
from megazero.version import VERSION

_MODULES = ("megazero.data._native", "megazero.ops._native")
_PACKAGES = (
    "triton",
    "transformer-engine",
    "flash-attn",
    "torchao",
    "liger-kernel",
    "gigatoken",
    "transformers",
)
_VARIABLES = re.compile(
    r"(CUDA|NCCL|GLOO|OMP|KMP|GOMP|MKL|TORCH|PYTORCH|TORCHINDUCTOR|TRITON|MEGAZERO|UCX|FI)_\w+"
    r"|MASTER_(ADDR|PORT)|(LOCAL_)?(RANK|WORLD_SIZE)|NVIDIA_VISIBLE_DEVICES|PYTHON(DONTWRITEBYTECODE|PATH)"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|SLURM_(JOB_ID|NTASKS|NNODES|CPUS_PER_TASK)"
)
_CPU_PRECISIONS = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16})
_SECONDS = 20  # timeout of a command


def gather(ranks: int | None = None) -> Environment:
    """Collect the facts about this machine.

    Args:
        ranks: the ranks of a training on this host; by default LOCAL_WORLD_SIZE, or one for each GPU.
    """
    gpus = tuple(_gpus())
    text = _output("nvidia-smi") or ""
    return Environment(
        versions=_versions(text),
        memory=host_memory(),
        processors=_processors(),
        ranks=ranks or int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or max(1, len(gpus)),
        gpus=gpus,
        driver_gpus=tuple(
            re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", _output("nvidia-smi", "-L") or "", re.M)
        ),
        torch_targets=tuple(_torch_targets()),
        modules=(*(_module(name) for name in _MODULES), *_cuda_kernels(gpus)),
        operators=tuple(row for operator in operators() for row in operator_rows(operator)),
        apex=_apex(),
        writes_bytecode=not sys.dont_write_bytecode,
        interfaces=_interfaces(),
        topology=_output("nvidia-smi", "topo", "-m"),
        variables={name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)},
        node=node_facts(_output, code_digest()),
    )


def _output(*command: str) -> str | None:
    """The output of a command; None if the command does not exist or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip()


def _first_match(pattern: str, text: str | None) -> str | None:
    match = re.search(pattern, text or "")
    return match and match.group(1)


def _versions(driver_text: str) -> Versions:
    available = backends()
    packages = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    compiler = _output(os.environ.get("CXX", "g++"), "--version")
    return Versions(
        megazero=VERSION,
        python=platform.python_version(),
        torch=torch.__version__,
        numpy=numpy.__version__,
        cuda=torch.version.cuda,
        driver=_first_match(r"CUDA Version: (\d+\.\d+)", driver_text),
        nccl=available["nccl"],
        gloo=available["gloo"] is not None,
        nvcc=_first_match(r"release (\d+\.\d+)", _output("nvcc", "--version")),
        compiler=compiler and compiler.splitlines()[0],
        ninja=_output("ninja", "--version"),
        packages=packages,
    )


def _gpus() -> Iterator[AcceleratorFacts]:
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield AcceleratorFacts(gpu.name, (gpu.major, gpu.minor), gpu.total_memory)


def _torch_targets() -> Iterator[tuple[int, int]]:
    """Compute capabilities from names such as sm_90 and sm_120."""
    for name in torch.cuda.get_arch_list() if torch.cuda.is_available() else ():
        number = _first_match(r"sm_(\d+)", name)
        if number is not None:
            yield int(number[:-1]), int(number[-1])


def _module(name: str) -> CompiledModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module(name)
        except ImportError as error:
            return CompiledModule(name, str(error))
    return CompiledModule(name)


def _cuda_kernels(gpus: Sequence[AcceleratorFacts]) -> Iterator[CompiledModule]:
    """The CUDA kernels for the first GPU, which are built if necessary; nothing if MEGAZERO_CUDA is 0."""
    if not gpus or os.environ.get("MEGAZERO_CUDA") == "0":
        return
    trouble = None
    try:
        cuda_library(gpus[0].capability)
    except (BuildError, OSError) as error:
        trouble = str(error)
    remedy = "install CUDA's toolkit, or set MEGAZERO_CUDA=0 to do without"
    yield CompiledModule("CUDA kernels", trouble, remedy)


def _apex() -> str:
    """Whose package apex is: NVIDIA's has a folder `multi_tensor_apply`, PyPI's is unrelated."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "absent"
    places = spec.submodule_search_locations or ()
    return "nvidia" if any((Path(place) / "multi_tensor_apply").is_dir() for place in places) else "other"


def _number(path: Path) -> int | None:
    """The number in a file; None without a file, or if it holds a word such as "max"."""
    with suppress(OSError, ValueError):
        return int(path.read_text().split()[0])
    return None


def host_memory() -> HostMemory:
    """The memory and disk of this host."""
    text = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").exists() else ""
    total, available = (_first_match(rf"{name}:\s+(\d+) kB", text) for name in ("MemTotal", "MemAvailable"))
    limit = _number(CGROUP / "memory.max") or _number(CGROUP / "memory/memory.limit_in_bytes")
    if limit is not None and total is not None and limit > int(total) << 10:
        limit = None  # cgroup v1 has a huge number instead of no limit
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return HostMemory(
        total=None if total is None else int(total) << 10,
        available=None if available is None else int(available) << 10,
        limit=limit,
        shared=shared and shared.total,
        shared_free=shared and shared.free,
        disk_free=shutil.disk_usage(Path.cwd()).free,
    )


def _processors() -> Processors:
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return Processors(
        cores,
        usable,
        core_quota(),
        torch.get_num_threads(),
        os.environ.get("OMP_NUM_THREADS"),
        load_average(),
        {name: measure_matmul_rate(dtype) for name, dtype in _CPU_PRECISIONS.items()},
    )


def _interfaces() -> Mapping[str, str]:
    """Network interfaces and InfiniBand ports by name, with state and, if known, speed."""
    interfaces = {}
    for folder in sorted(Path("/sys/class/net").glob("*")):
        with suppress(OSError):
            state = (folder / "operstate").read_text().strip()
            speed = None
            with suppress(OSError):
                speed = _number(folder / "speed")
            interfaces[folder.name] = f"{state}, {speed} Mb/s" if speed and speed > 0 else state
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        with suppress(OSError):
            state, rate = ((port / name).read_text().strip() for name in ("state", "rate"))
            interfaces[f"{port.parent.parent.name} port {port.name}"] = f"{state}, {rate}"
    return interfaces
