"""Builds megazero and, where a C++ compiler is present, its native data helpers and CPU kernels.

The extensions are optional: without a compiler the package installs and uses numpy and torch, slower.

The CUDA kernels are built too if torch is there, is one for CUDA, and nvcc is found. MEGAZERO_CUDA=1 builds
them with any torch, and then a failure is an error; MEGAZERO_CUDA=0 leaves them out.
"""

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import find_packages, setup

native_data = Pybind11Extension(
    "megazero.data._native",
    sorted(str(path) for path in Path("csrc/data").glob("*.cpp")),
    include_dirs=["csrc"],
    cxx_std=17,
    extra_compile_args=["-O3", "-Wall", "-Wextra", "-ffp-contract=off"],
    optional=True,
)

# Compiled for OpenMP but not linked to a runtime: its symbols are those of the one that torch has loaded, so
# that there is one pool of threads. Apple's compiler has no OpenMP; there the kernels run in one thread.
native_ops = Pybind11Extension(
    "megazero.ops._native",
    ["csrc/common/bindings.cpp", *sorted(str(path) for path in Path("csrc").glob("*/cpu.cpp"))],
    include_dirs=["csrc"],
    cxx_std=17,
    extra_compile_args=[
        *("-O3", "-Wall", "-Wextra", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
        # Threading jumps turns a chain of selections into masks of masks, which cost more than they save.
        *("-fno-thread-jumps", "-fno-split-paths"),
        "-fopenmp" if sys.platform == "linux" else "-fopenmp-simd",
    ],
    optional=True,
)

# Shared memory and futexes as Linux has them; elsewhere ranks of one host talk over Gloo.
native_mpu = Pybind11Extension(
    "megazero.mpu._native",
    sorted(str(path) for path in Path("csrc/mpu").glob("*.cpp")),
    include_dirs=["csrc"],
    cxx_std=17,
    extra_compile_args=["-O3", "-Wall", "-Wextra", "-fopenmp-simd"],
    extra_link_args=["-pthread"],
    optional=True,
)


def torch_is_for_cuda():
    """Whether there is a torch, and it is built for CUDA; it is not imported, which would take seconds."""
    found = importlib.util.find_spec("torch")
    return (
        found is not None and runpy.run_path(Path(found.origin).with_name("version.py"))["cuda"] is not None
    )


BUILD_KERNELS = [sys.executable, "-m", "megazero.cli", "kernels", "build"]


class BuildAll(build_ext):
    """The extensions, and the library of CUDA kernels."""

    def run(self):
        super().run()
        wanted = os.environ.get("MEGAZERO_CUDA")
        if wanted is None:
            wanted = "maybe" if torch_is_for_cuda() else "0"
        if wanted != "0":
            subprocess.run(BUILD_KERNELS, cwd=Path(__file__).parent, check=wanted == "1")


setup(
    name="megazero",
    version="0.1.0",
    description="3D-parallel pretraining of GPT and BERT, the same numbers on any layout",
    packages=find_packages(include=["megazero", "megazero.*", "data_tools", "data_tools.*"]),
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.9",
        "numpy>=1.26",
        "ninja>=1.11",
        "pydantic>=2.6",
        "pyyaml>=6",
        "tokenizers>=0.20",
        "sentencepiece>=0.2",
        # Wheels for macOS begin with Python 3.11; there alone sentences cannot be split.
        'sentencex>=1.0.32; sys_platform != "darwin" or python_version >= "3.11"',
        "regex>=2023.12",
        "safetensors>=0.4",
        "xxhash>=3",
        "rich>=13",
        "tensorboard>=2.14",
    ],
    extras_require={
        "fast": ["gigatoken>=0.10", "isal>=1.5", "orjson>=3.9"],
        "dev": ["pytest>=8", "pytest-xdist>=3.5", "ruff>=0.8", "hypothesis>=6", "transformers>=4.45"],
        "plot": ["matplotlib>=3.8"],
        "wandb": ["wandb"],
    },
    ext_modules=[native_data, native_ops, *([native_mpu] if sys.platform == "linux" else [])],
    cmdclass={"build_ext": BuildAll},
    entry_points={"console_scripts": ["megazero=megazero.cli:main"]},
)
