"""Libraries of kernels: built once, whole or not at all, and refused with the reason."""

import ctypes
import os
import re
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megazero.commands import kernels as commands
from megazero.kernels import build as build_module
from megazero.kernels.build import (
    BuildError,
    LibraryRecipe,
    build,
    built_cuda_library,
    code_for,
    cuda_recipe,
    find_nvcc,
    known_architectures,
    path_of,
)
from megazero.kernels.library import KernelLibrary
from megazero.ops import cuda
from tests.kernels.harness import library_path, watched
from tests.tables import over_table

SOURCE = 'extern "C" int answer() { return 42; }\n'


def recipe(tmp_path, text=SOURCE, flags=""):
    source = tmp_path / "answer.cpp"
    source.write_text(text, encoding="utf-8")
    return LibraryRecipe("answer", (source,), f"g++ -fPIC {flags} -c $in -o $out", "g++ -shared $in -o $out")


def test_a_library_is_built_once(tmp_path):
    made = recipe(tmp_path)
    path = build(made, tmp_path / "kept")
    before = path.stat().st_mtime_ns
    assert build(made, tmp_path / "kept") == path == path_of(made, tmp_path / "kept")
    assert path.stat().st_mtime_ns == before


def test_another_source_or_command_is_another_library(tmp_path):
    names = {path_of(recipe(tmp_path), tmp_path).name, path_of(recipe(tmp_path, flags="-O2"), tmp_path).name}
    names.add(path_of(recipe(tmp_path, SOURCE.replace("42", "43")), tmp_path).name)
    assert len(names) == 3


def test_a_source_that_does_not_compile_leaves_nothing_and_is_told(tmp_path):
    with pytest.raises(BuildError, match="`answer` must compile, but does not:(?s:.)*answer.cpp:1"):
        build(recipe(tmp_path, "int answer() { return nothing; }\n"), tmp_path / "kept")
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".lock"]
    assert build(recipe(tmp_path), tmp_path / "kept").is_file()


def test_what_a_build_that_was_killed_left_is_not_taken(tmp_path):
    made = recipe(tmp_path)
    kept = tmp_path / "kept"
    (kept / "tmpkilled").mkdir(parents=True)
    (kept / "tmpkilled" / "library.so").write_bytes(b"half")
    path_of(made, kept).with_suffix(".lock").write_text("")
    path = build(made, kept)
    assert path.stat().st_size > 1000


def test_no_nvcc_and_no_sources_are_told(monkeypatch, tmp_path):
    monkeypatch.setattr(build_module, "find_nvcc", lambda: None)
    with pytest.raises(BuildError, match="`nvcc` must be there"):
        cuda_recipe()
    monkeypatch.undo()
    monkeypatch.setattr(build_module, "CSRC", tmp_path)
    with pytest.raises(BuildError, match="must hold the kernels' sources"):
        build_module.kernel_sources()


def test_nvcc_is_looked_for_where_cuda_home_says(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").write_text("")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_nvcc() == tmp_path / "bin/nvcc"


def test_nvcc_is_found_among_pythons_packages(monkeypatch, tmp_path):
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build_module.shutil, "which", lambda name: None)
    monkeypatch.setattr(build_module, "INSTALLED_TOOLKIT", tmp_path / "nothing")
    monkeypatch.setattr(build_module.sysconfig, "get_path", lambda name: str(tmp_path))
    assert find_nvcc() is None
    (tmp_path / "nvidia/cu13/bin").mkdir(parents=True)
    (tmp_path / "nvidia/cu13/bin/nvcc").write_text("")
    assert find_nvcc() == tmp_path / "nvidia/cu13/bin/nvcc"


@pytest.fixture
def a_toolkit(monkeypatch, tmp_path):
    """An nvcc that does nothing but list what it compiles for."""

    def pretend(*numbers):
        nvcc = tmp_path / "nvcc"
        lines = " ".join(f"compute_{number}" for number in numbers)
        nvcc.write_text(f'#!/bin/sh\n[ "$*" = --list-gpu-arch ] && printf "%s\\n" {lines}\n')
        nvcc.chmod(0o755)
        monkeypatch.setattr(build_module, "find_nvcc", lambda: nvcc)

    return pretend


CUDA_12_6 = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90)
CUDA_13_0 = (75, 80, 86, 87, 88, 89, 90, 100, 110, 103, 120, 121)


@pytest.mark.parametrize(
    ("toolkit", "known"),
    [
        (CUDA_12_6, ("sm_80", "sm_90")),
        (CUDA_13_0, ("sm_80", "sm_90", "sm_100")),
        ((90, 100), ("sm_90", "sm_100")),
    ],
)
def test_what_nvcc_does_not_know_is_left_out(a_toolkit, toolkit, known):
    a_toolkit(*toolkit)
    assert known_architectures() == known
    compiled = [f"-gencode=arch={each.replace('sm', 'compute')},code={each}" for each in known]
    newest = known[-1].replace("sm", "compute")
    words = cuda_recipe().compile.split()
    assert [word for word in words if "-gencode" in word] == [
        *compiled,
        f"-gencode=arch={newest},code={newest}",
    ]


def test_an_nvcc_that_knows_none_of_ours_is_told(a_toolkit):
    a_toolkit(50, 70)
    with pytest.raises(BuildError, match="one of sm_80, sm_90, sm_100, but lists compute_50, compute_70;"):
        known_architectures()


def test_an_nvcc_that_does_not_run_is_told(monkeypatch, tmp_path):
    (tmp_path / "nvcc").write_text("")
    monkeypatch.setattr(build_module, "find_nvcc", lambda: tmp_path / "nvcc")
    with pytest.raises(BuildError, match="nvcc` must run, but does not: "):
        known_architectures()


ALL, BEFORE_12_8 = ("sm_80", "sm_90", "sm_100"), ("sm_80", "sm_90")


# Machine code runs on devices of its own major version only.
@over_table(
    ("capability", "known", "code"),
    [
        ((8, 0), ALL, "sm_80"),
        ((8, 6), ALL, "sm_80"),
        ((8, 9), ALL, "sm_80"),
        ((9, 0), ALL, "sm_90"),
        ((10, 0), ALL, "sm_100"),
        ((10, 3), ALL, "sm_100"),
        ((11, 0), ALL, "compute_100"),
        ((12, 0), ALL, "compute_100"),
        ((12, 1), ALL, "compute_100"),
        ((9, 0), BEFORE_12_8, "sm_90"),
        ((10, 0), BEFORE_12_8, "compute_90"),
        ((12, 0), BEFORE_12_8, "compute_90"),
        ((9, 0), ("sm_80", "sm_100"), "compute_80"),
    ],
)
def test_a_device_has_code_that_it_runs(capability, known, code):
    assert code_for(capability, known) == code


def test_a_device_older_than_all_code_is_told():
    with pytest.raises(BuildError, match="must have compute capability 10.0 or more, but has 9.0"):
        code_for((9, 0), ("sm_100",))


@pytest.mark.parametrize(
    ("codes", "options"),
    [
        (["sm_90"], ["arch=compute_90,code=sm_90", "arch=compute_90,code=compute_90"]),
        (["compute_100"], ["arch=compute_100,code=compute_100"]),
        (
            ["sm_100", "sm_80"],
            [
                "arch=compute_100,code=sm_100",
                "arch=compute_80,code=sm_80",
                "arch=compute_100,code=compute_100",
            ],
        ),
    ],
)
def test_the_newest_code_is_there_as_ptx(a_toolkit, codes, options):
    a_toolkit(*CUDA_13_0)
    words = cuda_recipe(codes).compile.split()
    assert [word.removeprefix("-gencode=") for word in words if "-gencode" in word] == options


def prebuilt(a_toolkit, folder, codes):
    """An empty file with the name of a library of these codes."""
    a_toolkit(*CUDA_13_0)
    path = folder / cuda_recipe(codes).file_name()
    path.write_bytes(b"")
    return path


@pytest.mark.parametrize(
    ("codes", "capability", "serves"),
    [
        (ALL, (8, 0), True),
        (ALL, (8, 6), True),
        (ALL, (9, 0), True),
        (ALL, (12, 0), True),
        (["sm_90"], (8, 0), False),
        (["sm_90"], (10, 0), True),
        (["sm_80"], (9, 0), True),
    ],
)
def test_a_library_that_was_built_elsewhere_needs_no_nvcc(
    a_toolkit, monkeypatch, tmp_path, codes, capability, serves
):
    """The library of a wheel was once passed over on machines without nvcc."""
    path = prebuilt(a_toolkit, tmp_path, codes)
    monkeypatch.setattr(build_module, "find_nvcc", lambda: None)
    assert built_cuda_library(capability, [tmp_path]) == (path if serves else None)


COMPILER = """#!/bin/sh
[ "$*" = --list-gpu-arch ] && { echo compute_80; echo compute_90; exit; }
echo called >> "$(dirname "$0")/calls"
for word; do case $word in
    -gencode*|-Xcompiler|-Xptxas|-v,-warn*) ;;
    *.cu) set -- "$@" -x c++ "$word" ;;
    *) set -- "$@" "$word" ;;
esac; shift; done
exec g++ -fPIC "$@"
"""


@pytest.fixture
def a_compiler(monkeypatch, tmp_path):
    """csrc with one kernel, and an nvcc for it that is g++; the fixture's value says how often it ran."""
    csrc = tmp_path / "built/csrc"
    for name, text in (("layer_norm/cuda.cu", SOURCE), ("common/errors.cu", "int errors;\n")):
        (csrc / name).parent.mkdir(parents=True)
        (csrc / name).write_text(text, encoding="utf-8")
    nvcc = tmp_path / "toolkit/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(COMPILER, encoding="utf-8")
    nvcc.chmod(0o755)
    monkeypatch.setattr(build_module, "CSRC", csrc)
    monkeypatch.setattr(build_module, "find_nvcc", lambda: nvcc)
    return lambda: len((nvcc.parent / "calls").read_text().split())


def test_a_folder_that_is_moved_serves_without_nvcc(a_compiler, monkeypatch, tmp_path):
    """The hash once held the sources' paths and nvcc's, so that a wheel's library was never found."""
    built = build(cuda_recipe(), tmp_path / "built/prebuilt")
    assert built.name.endswith("-sm_80+sm_90+compute_90.so")
    shutil.move(tmp_path / "built", tmp_path / "installed")
    shutil.rmtree(tmp_path / "toolkit")
    monkeypatch.undo()
    monkeypatch.setattr(build_module, "find_nvcc", lambda: pytest.fail("nvcc was looked for"))
    monkeypatch.setattr(build_module, "CSRC", tmp_path / "installed/csrc")
    moved = built_cuda_library((9, 0), [tmp_path / "installed/prebuilt"])
    assert moved == tmp_path / "installed/prebuilt" / built.name
    assert ctypes.CDLL(str(moved)).answer() == 42


def test_ranks_that_start_together_build_once(a_compiler, tmp_path):
    with ThreadPoolExecutor(4) as ranks:
        paths = list(ranks.map(lambda _: build(cuda_recipe(), tmp_path / "kept"), range(4)))
    assert len(set(paths)) == 1
    assert a_compiler() == 3  # two sources and the link


def test_a_warning_is_an_error_in_ci_alone(a_compiler, monkeypatch, tmp_path, capfd):
    """Another ptxas that spills two registers once left a user without any kernel."""
    monkeypatch.setattr(build_module, "library_folder", lambda: tmp_path / "kept")
    assert commands.main(["build", "--strict"]) == 0
    source = build_module.CSRC / "layer_norm/cuda.cu"
    source.write_text(f"{SOURCE}#warning two registers are spilled\n", encoding="utf-8")
    assert commands.main(["build"]) == 0
    capfd.readouterr()
    assert commands.main(["build", "--strict"]) == 1
    assert re.search(
        "must compile without a warning, but has:\n.*: warning: .*two reg", capfd.readouterr().err
    )


def test_machine_code_comes_before_ptx(a_toolkit, tmp_path):
    prebuilt(a_toolkit, tmp_path, ["sm_80"])
    own = prebuilt(a_toolkit, tmp_path, ["sm_90"])
    assert built_cuda_library((9, 0), [tmp_path]) == own


def test_a_library_of_other_sources_is_passed_over(a_toolkit, monkeypatch, tmp_path):
    prebuilt(a_toolkit, tmp_path, ["sm_90"])
    changed = tmp_path / "csrc"
    shutil.copytree(build_module.CSRC, changed)
    monkeypatch.setattr(build_module, "CSRC", changed)
    assert built_cuda_library((9, 0), [tmp_path]) is not None  # another place, the same contents
    with open(changed / "layer_norm/cuda.cu", "a") as source:
        source.write("// changed\n")
    assert built_cuda_library((9, 0), [tmp_path]) is None


def test_a_place_with_spaces_and_colons_compiles(tmp_path):
    folder = tmp_path / "my: $csrc"
    folder.mkdir()
    assert build(recipe(folder), tmp_path / "kept").is_file()


@pytest.fixture
def a_device(monkeypatch, a_toolkit):
    """A device of a given capability, whose library is the one for the CPU."""

    def pretend(capability):
        a_toolkit(*CUDA_13_0)
        monkeypatch.delenv("MEGAZERO_CUDA", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(cuda, "built_cuda_library", lambda capability: library_path())

    return pretend


def test_a_device_that_is_new_enough_has_the_kernels(a_device):
    a_device((9, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(cuda.load_cuda_kernels(), KernelLibrary)


def test_a_device_that_is_too_old_has_torch_instead(a_device):
    a_device((7, 0))
    with pytest.warns(UserWarning, match="must have compute capability 8.0 or more, but has 7.0"):
        assert cuda.load_cuda_kernels() is None


def test_a_driver_that_does_not_suit_the_toolkit_is_told(a_device, monkeypatch):
    a_device((9, 0))
    monkeypatch.setattr(KernelLibrary, "driver_error", lambda self: "CUDA driver version is insufficient")
    with pytest.warns(UserWarning, match="The driver must suit the toolkit.*driver version is insufficient"):
        assert cuda.load_cuda_kernels() is None


def test_a_library_that_is_damaged_is_told(a_device, monkeypatch, tmp_path):
    a_device((9, 0))
    half = tmp_path / "half.so"
    half.write_bytes(bytes(1000))
    monkeypatch.setattr(cuda, "built_cuda_library", lambda capability: half)
    with pytest.warns(UserWarning, match="works without its CUDA kernels: .*half.so"):
        assert cuda.load_cuda_kernels() is None


def test_kernels_can_be_switched_off(a_device, monkeypatch):
    a_device((9, 0))
    monkeypatch.setenv("MEGAZERO_CUDA", "0")
    assert cuda.load_cuda_kernels() is None


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [
        ((8, 0), "sm_80"),
        ((8, 9), "sm_80"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((12, 0), "compute_100"),
    ],
)
def test_the_newest_architecture_that_runs_is_built(a_device, monkeypatch, capability, architecture):
    a_device(capability)
    built = []
    monkeypatch.setattr(cuda, "built_cuda_library", lambda capability: None)
    monkeypatch.setattr(cuda, "build", lambda recipe: built.append(recipe) or library_path())
    assert cuda.load_cuda_kernels() is not None
    assert f"code={architecture} " in built[0].compile
    assert os.path.basename(built[0].sources[0]) == "cuda.cu"


@over_table("width", [2**31, 2**32 + 8, 2**40])
def test_a_width_that_32_bits_do_not_hold_is_refused(width):
    library, x, vector = watched(), torch.ones(8), torch.ones(8)
    with pytest.raises(RuntimeError, match="`layer_norm_forward` must start, but CUDA says: invalid"):
        library.launch(
            "layer_norm_forward",
            x.dtype,
            vector.dtype,
            1,
            width,
            x,
            None,
            vector,
            vector,
            1e-5,
            None,
            x.clone(),
            *[vector] * 2,
        )
