"""Builds the libraries of kernels from csrc with ninja, once for each state of the sources.

A library's name holds a hash of its sources and commands, and it appears under that name only when it is
whole, so a build that was cut short is never taken for one that was not.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megazero.errors import MegazeroError
from megazero.file_lock import try_lock

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
# From the oldest to the newest. Code for one runs on devices of the same major version only.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
INSTALLED_TOOLKIT = Path("/usr/local/cuda")
# Registers that do not suffice, and local memory, are errors.
_NVCC_CHECKS = "-Xptxas -v,-warn-spills,-warn-lmem-usage -Werror all-warnings"
_LOCK_POLL_S = 0.2


class BuildError(MegazeroError):
    """Kernels cannot be compiled: there is no compiler, no source, or an error in one."""


@dataclass(frozen=True)
class LibraryRecipe:
    """How a library is made.

    Attributes:
        name: of the library.
        sources: files to compile.
        compile: a command with `$in` and `$out`, as ninja has them; run in csrc's folder.
        link: likewise, from objects to the library.
    """

    name: str
    sources: tuple[Path, ...]
    compile: str
    link: str

    def fingerprint(self) -> str:
        """A hash of the commands, the sources and all of csrc's headers."""
        digest = hashlib.sha256(f"{self.compile}\0{self.link}\0".encode())
        headers = [path for path in CSRC.rglob("*") if path.suffix in (".hpp", ".h")]
        for path in sorted({*self.sources, *headers}):
            digest.update(f"{path}\0".encode() + path.read_bytes() + b"\0")
        return digest.hexdigest()[:16]


def kernel_sources() -> tuple[Path, ...]:
    """The sources of all kernels. Raises BuildError if this installation came without them."""
    found = tuple(sorted(CSRC.glob("*/cuda.cu")))
    if not found:
        raise BuildError(
            f"`{CSRC}` must hold the kernels' sources, but has none; install megazero from its repository."
        )
    return found


def find_nvcc() -> Path | None:
    """nvcc of $CUDA_HOME, on the PATH, where NVIDIA's installer puts it, or of a Python package."""
    homes = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    on_path = shutil.which("nvcc")
    homes += [Path(on_path).parent] if on_path else []
    homes += [INSTALLED_TOOLKIT / "bin"]
    homes += sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin"))
    return next((home / "nvcc" for home in homes if (home / "nvcc").is_file()), None)


def known_architectures() -> tuple[str, ...]:
    """Those of ARCHITECTURES that nvcc compiles for: one before 12.8 has no sm_100.

    Raises BuildError without an nvcc that compiles for any of them.
    """
    nvcc = _nvcc()
    try:
        ended = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"`{nvcc}` must run, but does not: {error}.") from error
    listed = ended.stdout.split()
    known = tuple(each for each in ARCHITECTURES if _virtual(each) in listed)
    if not known:
        raise BuildError(
            f"`{nvcc}` must compile for one of {', '.join(ARCHITECTURES)}, but lists "
            f"{', '.join(listed) or 'none'}; install a CUDA toolkit from 11.1 on."
        )
    return known


def code_for(capability: tuple[int, int], architectures: Sequence[str]) -> str:
    """What a device of that compute capability runs: the newest that suits it of these, oldest first.

    Machine code (`sm_90`) suits devices of the same major version and no older minor one. Others have the
    newest of these as PTX (`compute_90`), which the driver compiles for any newer device (CUDA C++
    Programming Guide, "Application Compatibility"). Raises BuildError if the device is older than all.
    """
    numbers = {each: int(each.removeprefix("sm_")) for each in architectures}
    own = 10 * capability[0] + capability[1]
    suitable = [each for each, number in numbers.items() if number <= own]
    if not suitable:
        oldest, found = (f"{number // 10}.{number % 10}" for number in (min(numbers.values()), own))
        raise BuildError(f"The device must have compute capability {oldest} or more, but has {found}.")
    newest = suitable[-1]
    return newest if numbers[newest] // 10 == capability[0] else _virtual(newest)


def cuda_recipe(codes: Sequence[str] | None = None) -> LibraryRecipe:
    """The library that GPUs run: machine code for each `sm_N` of `codes`, PTX for each `compute_N`.

    By default that is machine code for all of `known_architectures()`. PTX of the newest is always there,
    for devices newer than all of them. Raises BuildError without nvcc or sources.
    """
    nvcc = _nvcc()
    wanted = tuple(codes) if codes is not None else known_architectures()
    newest = max((_virtual(each) for each in wanted), key=lambda each: int(each.removeprefix("compute_")))
    machine = [f"-gencode=arch={_virtual(each)},code={each}" for each in wanted if each != newest]
    flags = (
        f"-std=c++17 -O3 -I {CSRC} {' '.join(machine)} -gencode=arch={newest},code={newest} "
        f"-Xcompiler -fPIC {_NVCC_CHECKS}"
    )
    sources = (*kernel_sources(), CSRC / "common/errors.cu")
    return LibraryRecipe(
        "megazero_cuda", sources, f"{nvcc} {flags} -c $in -o $out", f"{nvcc} -shared $in -o $out"
    )


def _virtual(architecture: str) -> str:
    """compute_90 of sm_90: what PTX is for."""
    return architecture.replace("sm_", "compute_")


def _nvcc() -> Path:
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError(
            "`nvcc` must be there to compile the kernels for GPUs, but is not found; "
            "install the CUDA toolkit or set CUDA_HOME."
        )
    return nvcc


def on_cpu_recipe(sources: Sequence[Path] | None = None) -> LibraryRecipe:
    """The library that runs kernels on the CPU: those of csrc, or of `sources`.

    Raises BuildError without a C++ compiler or without sources.
    """
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    compiler = next((each for each in names if each and shutil.which(each)), None)
    if compiler is None:
        raise BuildError(
            "A C++17 compiler must be there to run kernels on the CPU, but none is on the PATH; "
            "install g++ or set CXX."
        )
    warnings = "-Wall -Wextra -Werror -Wno-unknown-pragmas"
    compile_command = f"{compiler} -x c++ -std=c++17 -O1 {warnings} -fPIC -I {CSRC} -c $in -o $out"
    chosen = kernel_sources() if sources is None else tuple(sources)
    imitation = sorted((CSRC / "common/on_cpu").glob("*.cpp"))
    name = "megazero_on_cpu" if sources is None else f"{chosen[0].stem}_on_cpu"
    return LibraryRecipe(name, (*chosen, *imitation), compile_command, f"{compiler} -shared $in -o $out")


def library_folder() -> Path:
    """Where built libraries are kept: in the repository if it can be written to, else in the user's cache."""
    if os.access(ROOT, os.W_OK):
        return ROOT / "build" / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megazero" / "kernels"


def path_of(recipe: LibraryRecipe, folder: Path | None = None) -> Path:
    """Where the recipe's library is once it is built."""
    return (folder or library_folder()) / f"lib{recipe.name}-{recipe.fingerprint()}.so"


def build(recipe: LibraryRecipe, folder: Path | None = None) -> Path:
    """The recipe's library, built if it is not there yet; of several processes, one builds, the others wait.

    Raises BuildError with the compiler's words if it fails.
    """
    target = path_of(recipe, folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_file():
        return target
    with open(target.with_suffix(".lock"), "w") as lock:
        while True:
            try:
                try_lock(lock.fileno())
                break
            except BlockingIOError:
                time.sleep(_LOCK_POLL_S)
        if not target.is_file():
            _run_ninja(recipe, target)
    return target


def _run_ninja(recipe: LibraryRecipe, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = [f"{path.parent.name}_{path.stem}.o" for path in recipe.sources]
        lines = [f"rule compile\n  command = {recipe.compile}", f"rule link\n  command = {recipe.link}"]
        lines += [f"build {o}: compile {path}" for o, path in zip(objects, recipe.sources, strict=True)]
        lines += [f"build library.so: link {' '.join(objects)}", "default library.so"]
        (Path(scratch) / "build.ninja").write_text("\n".join(lines) + "\n", encoding="utf-8")
        ended = subprocess.run([*_ninja(), "-C", scratch], capture_output=True, text=True)
        if ended.returncode != 0:
            lines = ended.stdout.splitlines()
            told = [line for line in lines if re.search("(error|warning) *:", line)] or lines
            words = "\n".join(told)[-4000:]
            raise BuildError(f"The library `{recipe.name}` must compile, but does not:\n{words}")
        target.with_suffix(".log").write_text(ended.stdout, encoding="utf-8")
        os.replace(Path(scratch) / "library.so", target)


def _ninja() -> list[str]:
    """The command of ninja: the Python package's, or one on the PATH."""
    beside = Path(sys.executable).with_name("ninja")
    found = str(beside) if beside.is_file() else shutil.which("ninja")
    if found is None:
        raise BuildError("`ninja` must be there to build kernels, but is not; run `pip install ninja`.")
    return [found]
