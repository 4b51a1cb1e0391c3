#!/usr/bin/env bash
# Checks that csrc compiles: the native modules if there is a C++ compiler, the kernels for GPUs if there is nvcc.
#
#   bash scripts/check_csrc.sh
set -euo pipefail
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z $(python scripts/setup_facts.py missing) ]]; then
    python - <<'PYTHON'
import importlib
import sys

import torch  # its OpenMP runtime serves the kernels

for package in ("data", "ops"):
    importlib.import_module(f"megazero.{package}._native")
PYTHON
    echo "csrc: the native modules are built and load"
    python -c 'from megazero.kernels.build import build, on_cpu_recipe; build(on_cpu_recipe())'
    echo "csrc: the kernels of GPUs are compiled for the CPU too, where tests run them"
elif command -v "${CXX:-c++}" g++ clang++ >/dev/null; then
    echo "csrc: error: there is a C++ compiler, but the native modules do not build:" >&2
    python setup.py build_ext --inplace --force >&2
    exit 1
else
    echo "csrc: no C++ compiler, so the native modules were not built"
fi

sources=$(find csrc -name cuda.cu | wc -l)
if [[ -z $(python -c 'from megazero.kernels.build import find_nvcc; print(find_nvcc() or "")') ]]; then
    echo "csrc: no nvcc, so 0 of $sources CUDA sources were compiled"
    exit 0
fi
python -m megazero.cli kernels build --strict >/dev/null
architectures=$(python -c 'from megazero.kernels.build import known_architectures; print(*known_architectures())')
echo "csrc: $sources CUDA sources were compiled for $architectures, without a warning or a spill"
