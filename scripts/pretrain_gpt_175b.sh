#!/usr/bin/env bash
# GPT-3 175B (Brown et al. 2020) on TP x PP x D GPUs: 8 ranks share each layer, 16 pipeline stages of two chunks
# each, the optimizer state sharded over the replicas. The layout is that of Narayanan et al. 2021.
#
#   DATA_PATH=my_text_document VOCAB_FILE=vocab.json MERGE_FILE=merges.txt bash scripts/pretrain_gpt_175b.sh
#
# Run it on each node, with NNODES (a multiple of 16 at 8 GPUs each), NODE_RANK and MASTER_ADDR set, or on all at once with
# scripts/slurm/pretrain_gpt_175b.sbatch. Further flags
# follow the script's name and take precedence. Without a GPU:
#
#   CHECK=1 bash scripts/pretrain_gpt_175b.sh     # shows the resolved configuration, or every reason to refuse it
#   PLAN=1 bash scripts/pretrain_gpt_175b.sh      # shows what the job would do on the A100 of the paper; PLAN_DEVICE=h100: on others
#   VERIFY=1 bash scripts/pretrain_gpt_175b.sh    # trains it shrunk, on this machine, against one process
set -euo pipefail
NNODES=${NNODES:-128}
PLAN_DEVICE=${PLAN_DEVICE:-a100-80g}
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

TP=${TP:-8}
PP=${PP:-16}
LAYERS_PER_CHUNK=${LAYERS_PER_CHUNK:-3}
ZERO_STAGE=${ZERO_STAGE:-1}

DATA_PATH=${DATA_PATH:-my_text_document}
VOCAB_FILE=${VOCAB_FILE:-vocab.json}
MERGE_FILE=${MERGE_FILE:-merges.txt}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/gpt_175b}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-1}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-1536}
TRAIN_SAMPLES=${TRAIN_SAMPLES:-146484375}

FLAGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --hidden-dropout 0
    --attention-dropout 0
    --init-method-std 0.006
    --tensor-model-parallel-size "$TP"
    --sequence-parallel
    --pipeline-model-parallel-size "$PP"
    --num-layers-per-virtual-pipeline-stage "$LAYERS_PER_CHUNK"
    --zero-stage "$ZERO_STAGE"
    --micro-batch-size "$MICRO_BATCH_SIZE"
    --global-batch-size "$GLOBAL_BATCH_SIZE"
    --train-samples "$TRAIN_SAMPLES"
    --lr 6.0e-5
    --min-lr 6.0e-6
    --lr-decay-style cosine
    --lr-warmup-samples 183105
    --lr-decay-samples 126953125
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --recompute-activations
    --data-path "$DATA_PATH"
    --split "99,1,0"
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$VOCAB_FILE"
    --merge-file "$MERGE_FILE"
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --save-interval 1000
    --async-save
    --keep-last 3
    --save-retain-interval 10000
    --eval-interval 1000
    --eval-iters 10
    --eval-from-start
    --log-interval 10
    --metrics-jsonl "$CHECKPOINT_PATH/metrics.jsonl"
)

if [[ -n ${VERIFY:-} ]]; then
    exec python -m megazero.cli verify --world-size $((GPUS_PER_NODE * NNODES)) --vocab-size 50257 "${FLAGS[@]}" "$@"
fi
launch pretrain_gpt.py "$@"
