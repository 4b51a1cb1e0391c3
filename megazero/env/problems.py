"""The problems of an environment; each kind is found by a pure function of the facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megazero.env.facts import Environment, Problem
from megazero.env.node_problems import NODE_CHECKS
from megazero.ops.cuda import OLDEST_CAPABILITY
from megazero.train.observe.host import BUSY, SLOWER, giga

DISK_BYTES = 1 << 30


def find_problems(env: Environment) -> tuple[Problem, ...]:
    """The problems of an environment, in a fixed order."""
    return tuple(problem for check in _CHECKS for problem in check(env))


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _sees_no_gpu(env: Environment) -> Iterator[Problem]:
    if env.driver_gpus and not env.gpus:
        build = f"built for CUDA {env.versions.cuda}" if env.versions.cuda else "built without CUDA"
        yield Problem(
            "gpu_unseen",
            f"torch must see the {len(env.driver_gpus)} GPUs that the driver lists, but torch "
            f"{env.versions.torch} ({build}) sees none",
            "install a torch built for CUDA, and look at CUDA_VISIBLE_DEVICES",
            stops=True,
        )


def _driver_too_old(env: Environment) -> Iterator[Problem]:
    """Builds for a newer CUDA than the driver's: a driver runs its own major version and older ones."""
    driver = env.versions.driver
    for name, what, version in (
        ("torch_newer_than_driver", "torch's CUDA", env.versions.cuda),
        ("toolkit_newer_than_driver", "nvcc's CUDA", env.versions.nvcc),
    ):
        if driver and version and _release(version)[0] > _release(driver)[0]:
            yield Problem(
                name,
                f"{what} must be at most the driver's ({driver}), but is {version}",
                "update the driver, or install one built for an older CUDA",
                stops=name == "torch_newer_than_driver",
            )


def _another_toolkit(env: Environment) -> Iterator[Problem]:
    cuda, nvcc = env.versions.cuda, env.versions.nvcc
    if cuda and nvcc and _release(cuda)[0] != _release(nvcc)[0]:
        yield Problem(
            "toolkit_of_another_cuda",
            f"nvcc's CUDA must have the major version of torch's ({cuda}), but is {nvcc}",
            f"install the toolkit of CUDA {cuda}: extensions that are built with torch's headers need it",
        )


def _capability(env: Environment) -> Iterator[Problem]:
    oldest = min(env.torch_targets, default=(0, 0))
    for number, gpu in enumerate(env.gpus):
        for name, least, who in (
            ("capability_below_torch", oldest, "this torch is"),
            ("capability_below_kernels", OLDEST_CAPABILITY, "megazero's kernels are"),
        ):
            if gpu.capability < least:
                yield Problem(
                    name,
                    f"the compute capability of GPU {number} ({gpu.name}) must be at least "
                    f"{_dotted(least)}, which {who} built for, but is {_dotted(gpu.capability)}",
                    "use a newer GPU, or leave this one out by CUDA_VISIBLE_DEVICES",
                    stops=name == "capability_below_torch",
                )


def _dotted(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"


def _backends(env: Environment) -> Iterator[Problem]:
    if env.gpus and env.versions.nccl is None:
        yield Problem(
            "nccl_absent",
            "torch must be built with NCCL where there are GPUs, but is not",
            "install a torch built with it, or train with `pretrain_gpt.py --distributed-backend gloo`",
            stops=True,
        )
    if not env.versions.gloo and not env.gpus:
        yield Problem(
            "gloo_absent",
            "torch must be built with Gloo where there is no GPU, but is not",
            "install a torch built with it; until then run one rank",
            stops=True,
        )


def _modules(env: Environment) -> Iterator[Problem]:
    for module in env.modules:
        if module.trouble is not None:
            yield Problem(
                "module_not_built",
                f"`{module.name}` must be built to be fast, but cannot be used ({module.trouble})",
                module.remedy,
            )


def _apex(env: Environment) -> Iterator[Problem]:
    if env.apex == "other":
        yield Problem(
            "foreign_apex",
            "`apex` must be NVIDIA's, but is another package of that name",
            "run `pip uninstall apex`: PyPI's is unrelated, NVIDIA's is built from its repository",
        )


def _threads(env: Environment) -> Iterator[Problem]:
    threads, usable = env.processors.omp_threads, env.processors.usable
    if env.processors.quota is not None:
        usable = max(1, min(usable, int(env.processors.quota)))
    if env.ranks > 1 and threads is None:
        yield Problem(
            "omp_threads_unset",
            f"OMP_NUM_THREADS must be set where {env.ranks} ranks share {usable} cores, but is not",
            f"set it to {max(1, usable // env.ranks)}",
        )
    elif threads is not None and threads.isdigit() and env.ranks * int(threads) > max(usable, env.ranks):
        yield Problem(
            "too_many_threads",
            f"OMP_NUM_THREADS times {env.ranks} ranks must be at most the usable cores ({usable}), but "
            f"OMP_NUM_THREADS is {threads}",
            f"set it to {max(1, usable // env.ranks)}",
        )


def _busy(env: Environment) -> Iterator[Problem]:
    load, usable = env.processors.load, env.processors.usable
    if load is not None and load > BUSY * usable:
        yield Problem(
            "machine_busy",
            f"the {usable} usable cores must be free for a training, but {load:.1f} processes wanted to run "
            "in the last minute",
            "end what else runs here, or expect longer times",
        )


def _slow_precision(env: Environment) -> Iterator[Problem]:
    rates, load = env.processors.rates, env.processors.load
    busy = load is not None and load > BUSY * env.processors.usable  # on a busy machine the rates say little
    if not env.gpus and not busy and rates and rates["bf16"] < SLOWER * rates["fp32"]:
        yield Problem(
            "bf16_slower_than_fp32",
            f"bf16 must run at least as fast as fp32 ({giga(rates['fp32'])} GFLOP/s) to pay, but runs at "
            f"{giga(rates['bf16'])}",
            "train in fp32 on this CPU",
        )


def _ranks_per_gpu(env: Environment) -> Iterator[Problem]:
    if env.gpus and env.ranks > len(env.gpus):
        yield Problem(
            "more_ranks_than_gpus",
            f"the ranks of this host must be at most its GPUs ({len(env.gpus)}), but are {env.ranks}",
            "start fewer ranks, or train with `pretrain_gpt.py --device cpu`",
            stops=True,
        )


def _bytecode(env: Environment) -> Iterator[Problem]:
    if not env.writes_bytecode:
        yield Problem(
            "no_bytecode",
            "Python must keep the modules that it compiles, but PYTHONDONTWRITEBYTECODE or -B forbids it",
            "unset it: each rank otherwise compiles all sources whenever it starts",
        )


def _disk(env: Environment) -> Iterator[Problem]:
    free = env.memory.disk_free
    if free is not None and free < DISK_BYTES:
        yield Problem(
            "disk_nearly_full",
            f"the disk of this folder must have 1 GiB free, but has {free >> 20} MiB",
            "make room, or keep checkpoints elsewhere",
        )


_CHECKS: tuple[Callable[[Environment], Iterator[Problem]], ...] = (
    _sees_no_gpu,
    _driver_too_old,
    _another_toolkit,
    _capability,
    _backends,
    _modules,
    _apex,
    _ranks_per_gpu,
    _threads,
    _busy,
    _slow_precision,
    _bytecode,
    _disk,
    *NODE_CHECKS,
)
