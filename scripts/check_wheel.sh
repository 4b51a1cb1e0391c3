#!/usr/bin/env bash
# Builds a wheel as pip does for a user (in an isolated environment), installs it where the repository is not, and
# makes a dataset and trains ten steps with it. Uses the active environment's torch and other dependencies.
#
#   bash scripts/check_wheel.sh
#
# PYTHON is the Python to do it with (default: the active environment's).
set -euo pipefail
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(command -v "${PYTHON:-python}")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

echo "wheel: building"
rm -rf build/lib* build/bdist*  # modules that are gone from the repository would be packed from there
"$python" -m pip --disable-pip-version-check wheel -q --no-deps --wheel-dir "$scratch/wheel" .
"$python" -m pip --disable-pip-version-check install -q --no-deps --no-compile --target "$scratch/site" "$scratch"/wheel/*.whl
du -h "$scratch"/wheel/*.whl

# Neither the repository nor a compiler may help from here on.
cd "$scratch"
unset CUDA_HOME CUDA_PATH
export PYTHONPATH=$scratch/site OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
CXX='' "$python" - <<'PYTHON'
import importlib
import os
import sys
from pathlib import Path

import torch  # its OpenMP runtime serves the kernels

import megazero
from megazero.kernels import build

home = Path(megazero.__file__).parent
if home.parent != Path(os.environ["PYTHONPATH"]):
    sys.exit(f"error: megazero must come from the wheel, but comes from {home}")
for package in ("data", "ops"):
    importlib.import_module(f"megazero.{package}._native")
assert (home / "py.typed").is_file()
packages = {path.parent.name for path in home.parent.glob("*/__init__.py")}
assert packages == {"megazero"}, f"the wheel must have one package, but has {packages}"
print(f"wheel: {len(build.kernel_sources())} CUDA sources, and the compiled CPU modules")
build.find_nvcc = lambda: None  # as in a container that has only the driver
for capability in ((8, 0), (9, 0), (10, 0)):
    library = build.built_cuda_library(capability)
    print(f"wheel: device {capability[0]}.{capability[1]} has {library.name if library else 'no kernels built in'}")
PYTHON
cat > asks.py <<'PYTHON'
from importlib.metadata import version

import deepspeed
from deepspeed.ops.adam import FusedAdam

assert deepspeed.__version__ == version("deepspeed"), version("deepspeed")
print(f"wheel: `import deepspeed` finds {FusedAdam.__module__} as release {version('deepspeed')}")
PYTHON
"$python" -m megazero.deepspeed asks.py
printf '{"text": "one two"}\n{"text": "three"}\n' > text.jsonl
cat > spawned.py <<'PYTHON'
import sys
import threading
import time

from megazero.cli import main

if __name__ == "__main__":  # beside a thread, workers are spawned
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    sys.exit(main(sys.argv[1:]))
PYTHON
preprocess=(data preprocess --input text.jsonl --workers 2 --append-eod --tokenizer-type ByteLevelTokenizer)
"$python" -m megazero.cli "${preprocess[@]}" --output-prefix forked
"$python" spawned.py "${preprocess[@]}" --output-prefix spawned
cmp forked_text_document.bin spawned_text_document.bin
"$python" -m megazero.cli data inspect forked_text_document --validate
echo "wheel: made a dataset away from the repository, on forked and on spawned workers"
"$python" -m megazero.cli pretrain --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 \
    --mock-data --vocab-size 256 --tokenizer-type NullTokenizer --lr 1e-3 --eval-iters 0 --train-iters 10 \
    --micro-batch-size 2 --global-batch-size 4 --log-interval 5 --save ckpt
[[ $(<ckpt/latest_checkpointed_iteration.txt) == 10 ]]
echo "wheel: trained 10 steps away from the repository"
