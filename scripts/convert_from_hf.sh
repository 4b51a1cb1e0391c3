#!/usr/bin/env bash
# Writes the weights of a local Hugging Face model (GPT-2 or Llama, safetensors) as checkpoint 0 of a new run.
#
#   bash scripts/convert_from_hf.sh HF OUT
#
# HF is a folder with config.json and model.safetensors or its shards. It prints the flags of pretrain_gpt.py
# that make the same model; `pretrain_gpt.py --load-hf HF` takes the weights without this step.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${VIRTUAL_ENV:-} && -x $here/.venv/bin/python ]]; then PATH=$here/.venv/bin:$PATH; fi
# Paths are relative to the user's working directory, so the package is found by its own location.
PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} exec python -m megazero.cli checkpoint from-hf "$@"
