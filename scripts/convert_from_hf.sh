#!/usr/bin/env bash
# Writes the weights of a local Hugging Face model as checkpoint 0 of a new run. docs/huggingface.md lists the classes.
#
#   bash scripts/convert_from_hf.sh HF OUT
#
# HF is a folder with config.json and model.safetensors or its shards. It prints how to train the model further;
# `pretrain_gpt.py --load-hf HF` takes the weights without this step.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${VIRTUAL_ENV:-} && -x $here/.venv/bin/python ]]; then PATH=$here/.venv/bin:$PATH; fi
# Paths are relative to the user's working directory, so the package is found by its own location.
PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} exec python -m megazero.cli checkpoint from-hf "$@"
