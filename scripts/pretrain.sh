#!/usr/bin/env bash
# Any training of your own on one or more nodes: an entry script, and its flags as they are.
#
#   bash scripts/pretrain.sh pretrain_gpt.py --config mine.yaml --save run --load run
#   bash scripts/pretrain.sh pretrain_bert.py --config mine.yaml --train-iters 100000
#
# GPUS_PER_NODE (8) ranks start on each node. On several nodes run it on each, with NNODES, NODE_RANK and MASTER_ADDR set;
# under SLURM, scripts/slurm/pretrain.sbatch does so. CHECK=1 shows the resolved configuration, or every reason to refuse
# it, and starts nothing; PLAN=1 says whether it fits and how long it takes (PLAN_DEVICE, h100). Both work without a GPU.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

if [[ ${1:-} != pretrain_gpt.py && ${1:-} != pretrain_bert.py ]]; then
    echo "error: the first word must be pretrain_gpt.py or pretrain_bert.py, but is \`${1:-}\`; see \`$0 --help\`." >&2
    exit 2
fi
FLAGS=()
launch "$@"
