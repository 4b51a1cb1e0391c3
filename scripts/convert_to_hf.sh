#!/usr/bin/env bash
# Writes a checkpoint as a folder that transformers' AutoModelForCausalLM loads: safetensors, config.json and
# the tokenizer.
#
#   bash scripts/convert_to_hf.sh CKPT OUT [flags]
#
# CKPT is a checkpoint, or the folder of a run, whose newest checkpoint is taken. --help lists the flags, such as
# --dtype bfloat16 and --max-shard-size 2GB.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${VIRTUAL_ENV:-} && -x $here/.venv/bin/python ]]; then PATH=$here/.venv/bin:$PATH; fi
# Paths are relative to the user's working directory, so the package is found by its own location.
PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} exec python -m megazero.cli checkpoint to-hf "$@"
