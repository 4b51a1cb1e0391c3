"""`megazero env`: each problem from given facts, the text, the document, and this machine's own facts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from megazero import cli
from megazero.commands import env as env_command
from megazero.env import gather as gathering
from megazero.env.facts import (
    AcceleratorFacts,
    CompiledModule,
    Environment,
    HostMemory,
    OperatorRow,
    Processors,
    Versions,
    operator_rows,
)
from megazero.env.gather import gather
from megazero.env.problems import find_problems
from megazero.env.report import document, report
from megazero.kernels.build import BuildError
from megazero.ops.dispatch import Implementation, Operator, where
from tests.tables import over_table

GIB = 1 << 30
H100 = AcceleratorFacts("H100", (9, 0), 80 * GIB)
SOUND = Environment(
    Versions("0.1.0", "3.12.1", "2.11.0", "2.1", cuda="13.0", driver="13.1", nccl="2.28", nvcc="13.0"),
    HostMemory(64 * GIB, 60 * GIB, None, 32 * GIB, 32 * GIB, 500 * GIB),
    Processors(16, 16, None, 2, "2"),
    ranks=8,
    gpus=(H100,) * 8,
    driver_gpus=("H100",) * 8,
    torch_targets=((7, 5), (9, 0)),
    modules=(CompiledModule("megazero.ops._native"),),
)
ON_CPU = replace(
    SOUND,
    versions=replace(SOUND.versions, cuda=None, driver=None, nccl=None, nvcc=None),
    gpus=(),
    driver_gpus=(),
    torch_targets=(),
)


def versions(**values):
    return replace(SOUND, versions=replace(SOUND.versions, **values))


PROBLEMS = {
    "gpu_unseen": (
        replace(ON_CPU, driver_gpus=("H100", "H100")),
        "torch must see the 2 GPUs that the driver lists, but torch 2.11.0 (built without CUDA) sees none; "
        "install a torch built for CUDA, and look at CUDA_VISIBLE_DEVICES [gpu_unseen]",
    ),
    "torch_newer_than_driver": (
        versions(driver="12.8", nvcc=None),
        "torch's CUDA must be at most the driver's (12.8), but is 13.0; update the driver, or install one "
        "built for an older CUDA [torch_newer_than_driver]",
    ),
    "toolkit_newer_than_driver": (
        versions(driver="12.8", cuda=None),
        "nvcc's CUDA must be at most the driver's (12.8), but is 13.0; update the driver, or install one "
        "built for an older CUDA [toolkit_newer_than_driver]",
    ),
    "toolkit_of_another_cuda": (
        versions(nvcc="12.4"),
        "nvcc's CUDA must have the major version of torch's (13.0), but is 12.4; install the toolkit of CUDA "
        "13.0: extensions that are built with torch's headers need it [toolkit_of_another_cuda]",
    ),
    "capability_below_torch": (
        replace(SOUND, torch_targets=((9, 5),), gpus=(H100,), ranks=1),
        "the compute capability of GPU 0 (H100) must be at least 9.5, which this torch is built for, but is "
        "9.0; use a newer GPU, or leave this one out by CUDA_VISIBLE_DEVICES [capability_below_torch]",
    ),
    "capability_below_kernels": (
        replace(SOUND, gpus=(replace(H100, name="T4", capability=(7, 5)),), ranks=1),
        "the compute capability of GPU 0 (T4) must be at least 8.0, which megazero's kernels are built for, "
        "but is 7.5; use a newer GPU, or leave this one out by CUDA_VISIBLE_DEVICES "
        "[capability_below_kernels]",
    ),
    "nccl_absent": (
        versions(nccl=None),
        "torch must be built with NCCL where there are GPUs, but is not; install a torch built with it, or "
        "train with `pretrain_gpt.py --distributed-backend gloo` [nccl_absent]",
    ),
    "gloo_absent": (
        replace(ON_CPU, versions=replace(ON_CPU.versions, gloo=False)),
        "torch must be built with Gloo where there is no GPU, but is not; install a torch built with it; "
        "until then run one rank [gloo_absent]",
    ),
    "module_not_built": (
        replace(SOUND, modules=(CompiledModule("megazero.ops._native", "no such file"),)),
        "`megazero.ops._native` must be built to be fast, but cannot be used (no such file); install a "
        "C++17 compiler and run `pip install -e .` [module_not_built]",
    ),
    "foreign_apex": (
        replace(SOUND, apex="other"),
        "`apex` must be NVIDIA's, but is another package of that name; run `pip uninstall apex`: PyPI's is "
        "unrelated, NVIDIA's is built from its repository [foreign_apex]",
    ),
    "more_ranks_than_gpus": (
        replace(SOUND, gpus=(H100,) * 4),
        "the ranks of this host must be at most its GPUs (4), but are 8; start fewer ranks, or train "
        "with `pretrain_gpt.py --device cpu` [more_ranks_than_gpus]",
    ),
    "omp_threads_unset": (
        replace(SOUND, processors=replace(SOUND.processors, omp_threads=None)),
        "OMP_NUM_THREADS must be set where 8 ranks share 16 cores, but is not; set it to 2 "
        "[omp_threads_unset]",
    ),
    "too_many_threads": (
        replace(SOUND, processors=replace(SOUND.processors, quota=8.0)),
        "OMP_NUM_THREADS times 8 ranks must be at most the usable cores (8), but OMP_NUM_THREADS is 2; set "
        "it to 1 [too_many_threads]",
    ),
    "machine_busy": (
        replace(SOUND, processors=replace(SOUND.processors, load=8.5)),
        "the 16 usable cores must be free for a training, but 8.5 processes wanted to run in the last "
        "minute; end what else runs here, or expect longer times [machine_busy]",
    ),
    "bf16_slower_than_fp32": (
        replace(ON_CPU, processors=replace(SOUND.processors, rates={"fp32": 150e9, "bf16": 75e9})),
        "bf16 must run at least as fast as fp32 (150 GFLOP/s) to pay, but runs at 75; train in fp32 on "
        "this CPU [bf16_slower_than_fp32]",
    ),
    "no_bytecode": (
        replace(SOUND, writes_bytecode=False),
        "Python must keep the modules that it compiles, but PYTHONDONTWRITEBYTECODE or -B forbids it; unset "
        "it: each rank otherwise compiles all sources whenever it starts [no_bytecode]",
    ),
    "disk_nearly_full": (
        replace(SOUND, memory=replace(SOUND.memory, disk_free=5 << 20)),
        "the disk of this folder must have 1 GiB free, but has 5 MiB; make room, or keep checkpoints "
        "elsewhere [disk_nearly_full]",
    ),
}


def test_rates_on_a_busy_machine_are_no_verdict():
    slow = replace(SOUND.processors, load=9.0, rates={"fp32": 1e9, "bf16": 1e8})
    assert [trouble.name for trouble in find_problems(replace(ON_CPU, processors=slow))] == ["machine_busy"]


@over_table("name", PROBLEMS)
def test_a_problem_is_named_alone_with_its_remedy(name):
    env, text = PROBLEMS[name]
    assert [str(each) for each in find_problems(env)] == [text]


@over_table(
    "env",
    [
        SOUND,
        ON_CPU,
        versions(cuda="12.8", nvcc="12.8"),  # a driver runs what is older
        replace(SOUND, apex="nvidia"),
        replace(SOUND, processors=replace(SOUND.processors, load=7.5, rates={"fp32": 2e9, "bf16": 1e9})),
        replace(ON_CPU, processors=replace(SOUND.processors, rates={"fp32": 100e9, "bf16": 85e9})),
        replace(ON_CPU, ranks=1, processors=replace(SOUND.processors, omp_threads=None)),
        replace(ON_CPU, memory=HostMemory(None, None)),
        replace(SOUND, processors=Processors(1, 1, None, 1, "1")),  # more ranks than cores, a thread each
    ],
)
def test_nothing_is_found_where_nothing_is_wrong(env):
    assert find_problems(env) == ()


def test_rows_say_what_runs_and_why_nothing_faster_does():
    fast = Implementation("fast", None, where(frozenset({"cpu"}), frozenset({torch.float32})))
    kernel = Implementation("kernel", None, where(frozenset({"cuda"}), built=lambda: False))
    table = Operator("cake", (kernel, fast, Implementation("reference", None)))
    wide = ("bfloat16", "float16", "float64")
    away = ("kernel", "serves cuda only")
    assert operator_rows(table) == (
        OperatorRow("cake", "cpu", "", wide, "reference", (away, ("fast", "serves float32 only"))),
        OperatorRow("cake", "cpu", "", ("float32",), "fast", (away,)),
        OperatorRow(
            "cake",
            "cuda",
            "",
            ("bfloat16", "float16", "float32", "float64"),
            "reference",
            (("kernel", "is not built"), ("fast", "serves cpu only")),
        ),
    )
    env = replace(SOUND, operators=operator_rows(table), gpus=(H100,), ranks=1)
    text = report(env)
    assert "  cake  reference (bfloat16, float16, float64); fast serves float32 only\n" in text
    assert "        fast (float32)\n" in text
    assert "  cake  reference (bfloat16, float16, float32, float64); kernel is not built\n" in text


def test_the_report_reads_like_this():
    env = replace(
        ON_CPU,
        apex="other",
        interfaces={"eth0": "up, 10000 Mb/s"},
        topology="GPU0\nGPU1",
        variables={"OMP_NUM_THREADS": "2"},
    )
    assert report(env).splitlines() == [
        "versions",
        "  megazero       0.1.0",
        "  python         3.12.1",
        "  torch          2.11.0",
        "  numpy          2.1",
        "  torch's CUDA   none: torch is built without it",
        "  driver's CUDA  none: no driver was found",
        "  NCCL           none",
        "  Gloo           torch's",
        "  nvcc           none",
        "  C++ compiler   none",
        "  ninja          none",
        "  apex           another package",
        "",
        "devices",
        "  CPU  no CUDA device: training runs on the CPU",
        "",
        "memory and disk",
        "  memory                      64.0 GiB, 60.0 GiB available",
        "  limit of the control group  none",
        "  /dev/shm                    32.0 GiB, 32.0 GiB free",
        "  free on this folder's disk  500.0 GiB",
        "",
        "cores and threads",
        "  cores                       16, 16 of them usable",
        "  limit of the control group  none",
        "  ranks on this host          8",
        "  OMP_NUM_THREADS             2",
        "  torch's threads             2",
        "",
        "network",
        "  eth0          up, 10000 Mb/s",
        "  GPU topology  GPU0",
        "                GPU1",
        "",
        "node",
        "  kernel                  unknown",
        "  sources of megazero     unknown",
        "  limits                  open files unlimited, processes unlimited, locked memory unlimited",
        "  governor of cores       unknown",
        "  domains of memory       1, the kernel moves no pages",
        "  transparent huge pages  unknown",
        "",
        "compiled modules",
        "  megazero.ops._native  built",
        "",
        "operators on cpu",
        "    none",
        "",
        "operators on cuda",
        "    (as it would be: there is no device)",
        "",
        "environment variables",
        "  OMP_NUM_THREADS  2",
        "",
        "problems: 1",
        f"  {PROBLEMS['foreign_apex'][1]}",
    ]
    assert "  GPU 0  H100, compute capability 9.0, 80.0 GiB\n" in report(SOUND)


def test_the_document_holds_all_facts_and_problems():
    read = json.loads(json.dumps(document(PROBLEMS["foreign_apex"][0])))
    assert read["gpus"][0] == {"name": "H100", "capability": [9, 0], "memory": 80 * GIB}
    assert [each["name"] for each in read["problems"]] == ["foreign_apex"]


def test_secrets_are_not_shown(monkeypatch, capsys):
    """`megazero env` printed values that `megazero launch` hides."""
    variables = {"TRITON_CACHE_KEY": "hidden", "NCCL_DEBUG": "INFO"}
    monkeypatch.setattr(env_command, "gather", lambda ranks: replace(SOUND, variables=variables))
    for words in ((), ("--json",)):
        env_command.main(words)
        said = capsys.readouterr().out
        assert "hidden" not in said
        assert "(not shown)" in said
        assert "INFO" in said


def test_this_machine_is_described(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SOME_SECRET", "x")
    env = gather(ranks=3)
    assert env.ranks == 3
    assert env.versions.torch == torch.__version__
    assert env.variables["NCCL_DEBUG"] == "INFO"
    assert "SOME_SECRET" not in env.variables
    assert {row.operator for row in env.operators} >= {"attention", "update", "swiglu"}
    assert env.memory.total is None or env.memory.total > GIB


def test_kernels_that_cannot_be_had_are_a_problem(monkeypatch):
    monkeypatch.delenv("MEGAZERO_CUDA", raising=False)
    monkeypatch.setattr(gathering, "_gpus", lambda: [AcceleratorFacts("V100", (7, 0), 32 * GIB)])

    def refuse(capability: tuple[int, int]) -> None:
        assert capability == (7, 0)
        raise BuildError("The device must have compute capability 8.0 or more, but has 7.0.")

    monkeypatch.setattr(gathering, "cuda_library", refuse)
    kernels = gather().modules[-1]
    assert (kernels.name, kernels.trouble) == (
        "CUDA kernels",
        "The device must have compute capability 8.0 or more, but has 7.0.",
    )
    found = {str(each) for each in find_problems(replace(SOUND, modules=(kernels,)))}
    assert found == {
        "`CUDA kernels` must be built to be fast, but cannot be used (The device must have compute "
        "capability 8.0 or more, but has 7.0.); install CUDA's toolkit, or set MEGAZERO_CUDA=0 to do without "
        "[module_not_built]"
    }
    monkeypatch.setenv("MEGAZERO_CUDA", "0")
    assert "CUDA kernels" not in [module.name for module in gather().modules]


@pytest.mark.parametrize(("inside", "kind"), [("multi_tensor_apply", "nvidia"), ("views", "other")])
def test_apex_is_told_from_the_package_of_that_name(tmp_path, monkeypatch, inside, kind):
    (tmp_path / "apex" / inside).mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert gathering._apex() == kind


def test_what_the_tools_print_is_read(monkeypatch):
    """As nvidia-smi and nvcc print it."""
    said = {
        ("nvidia-smi",): "| NVIDIA-SMI 580.65.06   Driver Version: 580.65.06   CUDA Version: 13.0     |",
        ("nvidia-smi", "-L"): "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\nGPU 1: NVIDIA H100 (UUID: GPU-2)",
        ("nvidia-smi", "topo", "-m"): "GPU0 X NV18",
        ("nvcc", "--version"): "Cuda compilation tools, release 13.0, V13.0.88",
        ("g++", "--version"): "g++ (Debian) 12.2.0\nCopyright",
        ("ninja", "--version"): "1.11.1",
    }
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(gathering, "_output", lambda *command: said.get(command))
    env = gather()
    versions = env.versions
    assert (versions.driver, versions.nvcc, versions.ninja) == ("13.0", "13.0", "1.11.1")
    assert versions.compiler == "g++ (Debian) 12.2.0"
    assert env.driver_gpus == ("NVIDIA H100 80GB HBM3", "NVIDIA H100")
    assert env.topology == "GPU0 X NV18"


@over_table(("flags", "status"), [([], 0), (["--json"], 0), (["--check"], 1)])
def test_only_a_check_fails_for_a_problem(monkeypatch, capsys, flags, status):
    from megazero.commands import env as command

    monkeypatch.setattr(command, "gather", lambda ranks: PROBLEMS["foreign_apex"][0])
    assert cli.main(["env", *flags]) == status
    assert "foreign_apex" in capsys.readouterr().out


@over_table(
    ("name", "status"),
    [("gpu_unseen", 1), ("more_ranks_than_gpus", 1), ("torch_newer_than_driver", 1), ("no_bytecode", 0)],
)
def test_a_problem_that_would_stop_a_training_is_a_failure(monkeypatch, capsys, name, status):
    from megazero.commands import env as command

    monkeypatch.setattr(command, "gather", lambda ranks: PROBLEMS[name][0])
    assert cli.main(["env"]) == status


def test_a_check_of_a_sound_machine_passes(monkeypatch, capsys):
    from megazero.commands import env as command

    monkeypatch.setattr(command, "gather", lambda ranks: SOUND)
    assert cli.main(["env", "--check"]) == 0
    assert capsys.readouterr().out.endswith("problems: none found\n")


def test_a_count_of_no_ranks_is_refused(capsys):
    assert cli.main(["env", "--nproc", "0"]) == 2
    assert capsys.readouterr().err == "error: `--nproc` must be at least 1, but is 0; correct it\n"
