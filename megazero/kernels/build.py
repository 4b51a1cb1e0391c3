"""Build the libraries of kernels from csrc with ninja, once for each state of the sources.

A library's name holds a hash of its sources and commands. The file gets that name only when it is complete,
so an interrupted build is never used. The hash covers contents, not paths, so a library that was built
elsewhere, such as one in a wheel, is found by its name without a compiler.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megazero.errors import MegazeroError
from megazero.file_lock import try_lock

ROOT = Path(__file__).resolve().parents[2]
# A repository has csrc beside the package; an installed package carries a copy of it.
CSRC = ROOT / "csrc" if (ROOT / "csrc").is_dir() else ROOT / "megazero" / "csrc"
PREBUILT = Path(__file__).with_name("prebuilt")
CUDA_LIBRARY = "megazero_cuda"
# From the oldest to the newest. Machine code runs on devices of the same major version only.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
INSTALLED_TOOLKIT = Path("/usr/local/cuda")
# Warn of spilled registers and of local memory.
_NVCC_CHECKS = "-Xptxas -v,-warn-spills,-warn-lmem-usage"


class BuildError(MegazeroError):
    """Kernels cannot be compiled: the compiler or the sources are missing, or a source has an error."""


@dataclass(frozen=True)
class LibraryRecipe:
    """The sources and commands that make a library.

    Attributes:
        name: the library's name.
        sources: the files to compile.
        compile: a command with ninja's `$in` and `$out`, and with `$compiler` and `$csrc`, whose values
            differ between machines and are not hashed.
        link: likewise, the command that links the objects into the library.
        compiler: the path of `$compiler`.
        codes: the machine code (`sm_N`) and PTX (`compute_N`) in a library for GPUs.
    """

    name: str
    sources: tuple[Path, ...]
    compile: str
    link: str
    compiler: str = ""
    codes: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """Hash the commands, the sources and csrc's headers, but not `codes`, which the file's name has."""
        flags = [flag for flag in self.compile.split() if not flag.startswith("-gencode=")]
        digest = hashlib.sha256(f"{' '.join(flags)}\0{self.link}\0".encode())
        headers = [path for path in CSRC.rglob("*") if path.suffix in (".hpp", ".h")]
        for path in sorted({*self.sources, *headers}):
            name = path.relative_to(CSRC).as_posix() if path.is_relative_to(CSRC) else path.name
            digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
        return digest.hexdigest()[:16]

    def file_name(self) -> str:
        """The file's name, such as ``libmegazero_cuda-0123456789abcdef-sm_90+compute_90.so``."""
        suffix = f"-{'+'.join(self.codes)}" if self.codes else ""
        return f"lib{self.name}-{self.fingerprint()}{suffix}.so"


def kernel_sources() -> tuple[Path, ...]:
    """The sources of all kernels. Raises BuildError if this installation came without them."""
    sources = tuple(sorted(CSRC.glob("*/cuda.cu")))
    if not sources:
        raise BuildError(
            f"`{CSRC}` must hold the kernels' sources, but has none; install megazero from its repository."
        )
    return sources


def find_nvcc() -> Path | None:
    """Find nvcc in $CUDA_HOME, on the PATH, where NVIDIA installs it, or in a Python package."""
    homes = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    on_path = shutil.which("nvcc")
    homes += [Path(on_path).parent] if on_path else []
    homes += [INSTALLED_TOOLKIT / "bin"]
    homes += sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin"))
    return next((home / "nvcc" for home in homes if (home / "nvcc").is_file()), None)


def known_architectures() -> tuple[str, ...]:
    """The members of ARCHITECTURES that nvcc compiles for; before CUDA 12.8, sm_100 is not among them.

    Raises BuildError if there is no nvcc, or it compiles for none of them.
    """
    nvcc = _nvcc()
    try:
        ended = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"`{nvcc}` must run, but does not: {error}.") from error
    listed = ended.stdout.split()
    known = tuple(name for name in ARCHITECTURES if _virtual(name) in listed)
    if not known:
        raise BuildError(
            f"`{nvcc}` must compile for one of {', '.join(ARCHITECTURES)}, but lists "
            f"{', '.join(listed) or 'none'}; install a CUDA toolkit from 11.1 on."
        )
    return known


def code_for(capability: tuple[int, int], architectures: Sequence[str]) -> str:
    """The code to build for a device of that compute capability, out of `architectures`, oldest to newest.

    Machine code (`sm_90`) runs on devices of the same major version and of the same or a newer minor one.
    Other devices get PTX (`compute_90`) of the newest architecture before theirs, which the driver compiles
    (CUDA C++ Programming Guide, "Application Compatibility"). Raises BuildError if the device is older than
    all of `architectures`.
    """
    numbers = {name: int(name.removeprefix("sm_")) for name in architectures}
    own = 10 * capability[0] + capability[1]
    suitable = [name for name, number in numbers.items() if number <= own]
    if not suitable:
        oldest, present = (f"{number // 10}.{number % 10}" for number in (min(numbers.values()), own))
        raise BuildError(f"The device must have compute capability {oldest} or more, but has {present}.")
    newest = suitable[-1]
    return newest if numbers[newest] // 10 == capability[0] else _virtual(newest)


def cuda_recipe(codes: Sequence[str] | None = None) -> LibraryRecipe:
    """The recipe of the library that GPUs run: machine code for each `sm_N` of `codes`, PTX for `compute_N`.

    `codes` are `known_architectures()` by default. PTX of the newest is always included, for devices newer
    than all of them. Raises BuildError without nvcc or sources.
    """
    nvcc = _nvcc()
    return _cuda_recipe(tuple(codes) if codes is not None else known_architectures(), str(nvcc))


def _cuda_recipe(codes: Sequence[str], nvcc: str) -> LibraryRecipe:
    newest = max(map(_virtual, codes), key=lambda code: int(code.removeprefix("compute_")))
    machine = [code for code in codes if code != newest]
    generated = [f"-gencode=arch={_virtual(code)},code={code}" for code in (*machine, newest)]
    # -lineinfo lets profilers show source lines, and leaves the machine code as it is.
    flags = f"-std=c++17 -O3 -lineinfo -I $csrc {' '.join(generated)} -Xcompiler -fPIC {_NVCC_CHECKS}"
    return LibraryRecipe(
        CUDA_LIBRARY,
        (*kernel_sources(), CSRC / "common/errors.cu"),
        f"$compiler {flags} -c $in -o $out",
        "$compiler -shared $in -o $out",
        nvcc,
        (*machine, newest),
    )


def built_cuda_library(capability: tuple[int, int], folders: Sequence[Path] | None = None) -> Path | None:
    """Find a built library of the present sources that a device of that capability runs; None without one.

    `folders` are `PREBUILT` and `library_folder()` by default. Raises BuildError if this installation has no
    sources, and so no hash to look for.
    """
    fingerprint = _cuda_recipe(ARCHITECTURES, "").fingerprint()
    for folder in folders if folders is not None else (PREBUILT, library_folder()):
        best: tuple[int, Path | None] = (0, None)
        for path in sorted(folder.glob(f"lib{CUDA_LIBRARY}-{fingerprint}-*.so")):
            for code in path.stem.rpartition("-")[2].split("+"):
                best = max(best, (_fit(capability, code), path), key=lambda pair: pair[0])
        if best[1] is not None and best[0]:
            return best[1]
    return None


def _fit(capability: tuple[int, int], code: str) -> int:
    """Score how well code suits a device: 0 if it cannot run, 1 for PTX, more for newer machine code."""
    kind, _, number = code.partition("_")
    own, version = 10 * capability[0] + capability[1], int(number)
    if version > own:
        return 0
    if kind == "compute":
        return 1
    return version if version // 10 == capability[0] else 0


def _virtual(architecture: str) -> str:
    """The name of an architecture's PTX: compute_90 for sm_90."""
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
    """The recipe of the library that runs the kernels of csrc, or of `sources`, on the CPU.

    Raises BuildError without a C++ compiler or without sources.
    """
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    compiler = next((name for name in names if name and shutil.which(name)), None)
    if compiler is None:
        raise BuildError(
            "A C++17 compiler must be there to run kernels on the CPU, but none is on the PATH; "
            "install g++ or set CXX."
        )
    warnings = "-Wall -Wextra -Werror -Wno-unknown-pragmas"
    command = f"$compiler -x c++ -std=c++17 -O1 {warnings} -fPIC -I $csrc -c $in -o $out"
    chosen = kernel_sources() if sources is None else tuple(sources)
    imitation = sorted((CSRC / "common/on_cpu").glob("*.cpp"))
    name = "megazero_on_cpu" if sources is None else f"{chosen[0].stem}_on_cpu"
    return LibraryRecipe(name, (*chosen, *imitation), command, "$compiler -shared $in -o $out", str(compiler))


def library_folder() -> Path:
    """The folder for built libraries: in the repository if it is writable, else in the user's cache."""
    if (ROOT / "csrc").is_dir() and os.access(ROOT, os.W_OK):
        return ROOT / "build" / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megazero" / "kernels"


def path_of(recipe: LibraryRecipe, folder: Path | None = None) -> Path:
    """The path of the recipe's library, built or not."""
    return (folder or library_folder()) / recipe.file_name()


def build(recipe: LibraryRecipe, folder: Path | None = None) -> Path:
    """Build the recipe's library unless it exists; returns its path.

    If several processes call this, one builds and the others wait. Raises BuildError with the compiler's
    output if the build fails.
    """
    target = path_of(recipe, folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_file():
        return target
    with open(target.with_suffix(".lock"), "w") as lock:
        try_lock(lock.fileno(), wait=True)
        if not target.is_file():
            _run_ninja(recipe, target)
    return target


def refuse_warnings(library: Path) -> None:
    """Raise BuildError if the compiler warned when `build` made a library.

    `build` itself accepts warnings, because a slow kernel with a spilled register is better than none.
    """
    lines = library.with_suffix(".log").read_text(encoding="utf-8").splitlines()
    # ninja's own lines begin with a bracket.
    warnings = [line for line in lines if re.search(r"\bwarning\b", line) and not line.startswith("[")]
    if warnings:
        text = "\n".join(warnings)[-4000:]
        raise BuildError(f"The library `{library.name}` must compile without a warning, but has:\n{text}")


def _run_ninja(recipe: LibraryRecipe, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = [_escaped(f"{path.parent.name}_{path.stem}.o") for path in recipe.sources]
        places = {"compiler": recipe.compiler, "csrc": str(CSRC)}
        lines = [f"{name} = {shlex.quote(place).replace('$', '$$')}" for name, place in places.items()]
        lines += [f"rule compile\n  command = {recipe.compile}", f"rule link\n  command = {recipe.link}"]
        pairs = zip(objects, recipe.sources, strict=True)
        lines += [f"build {object_}: compile {_escaped(path)}" for object_, path in pairs]
        lines += [f"build library.so: link {' '.join(objects)}", "default library.so"]
        (Path(scratch) / "build.ninja").write_text("\n".join(lines) + "\n", encoding="utf-8")
        ended = subprocess.run([_ninja(), "-C", scratch], capture_output=True, text=True)
        if ended.returncode != 0:
            lines = ended.stdout.splitlines()
            complaints = [line for line in lines if re.search("(error|warning) *:", line)] or lines
            words = "\n".join(complaints)[-4000:]
            raise BuildError(f"The library `{recipe.name}` must compile, but does not:\n{words}")
        target.with_suffix(".log").write_text(ended.stdout, encoding="utf-8")
        os.replace(Path(scratch) / "library.so", target)


def _escaped(path: object) -> str:
    """A path, escaped for ninja."""
    return re.sub(r"([$ :])", r"$\1", str(path))


def _ninja() -> str:
    """The path of ninja: beside this Python, or on the PATH."""
    beside = Path(sys.executable).with_name("ninja")
    ninja = str(beside) if beside.is_file() else shutil.which("ninja")
    if ninja is None:
        raise BuildError("`ninja` must be there to build kernels, but is not; run `pip install ninja`.")
    return ninja
