#!/usr/bin/env bash
# A checkpoint as a folder that transformers' AutoModelForCausalLM loads: safetensors, config.json, tokenizer.
#
#   bash scripts/convert_to_hf.sh CKPT OUT [flags]
#
# CKPT is a checkpoint, or the folder of a run, whose newest one is taken. --help lists the flags, such as
# --dtype bfloat16 and --max-shard-size 2GB.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${VIRTUAL_ENV:-} && -x $here/.venv/bin/python ]]; then PATH=$here/.venv/bin:$PATH; fi
# Paths are taken from where the user is, so the package is found by its place.
PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} exec python -m megazero.cli checkpoint to-hf "$@"
