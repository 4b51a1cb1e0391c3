#!/usr/bin/env bash
# Megatron-Turing NLG 530B (Smith et al. 2022) on TP x PP x D GPUs: 8 ranks share each layer, 35 pipeline stages of three
# layers, the optimizer state sharded over the replicas. Layout, batch and rates are the paper's, with 280 nodes.
#
#   DATA_PATH=my_text_document VOCAB_FILE=vocab.json MERGE_FILE=merges.txt bash scripts/pretrain_gpt_530b.sh
#
# Run it on each node, with NNODES (280; or 350 or 420 with another `--rampup-batch-size`), NODE_RANK and MASTER_ADDR set, or all at once with
# scripts/slurm/pretrain_gpt_530b.sbatch. Further flags follow the script's name and take precedence. Without a GPU:
#
#   CHECK=1 bash scripts/pretrain_gpt_530b.sh     # shows the resolved configuration, or every reason to refuse it
#   PLAN=1 bash scripts/pretrain_gpt_530b.sh      # shows what the job would do on the A100 of the paper; PLAN_DEVICE=h100: on others
#   VERIFY=1 bash scripts/pretrain_gpt_530b.sh    # trains it shrunk, on this machine, against one process
set -euo pipefail
NNODES=${NNODES:-280}
PLAN_DEVICE=${PLAN_DEVICE:-a100-80g}
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

TP=${TP:-8}
PP=${PP:-35}
ZERO_STAGE=${ZERO_STAGE:-1}

DATA_PATH=${DATA_PATH:-my_text_document}
VOCAB_FILE=${VOCAB_FILE:-vocab.json}
MERGE_FILE=${MERGE_FILE:-merges.txt}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/gpt_530b}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-1}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-1920}
TRAIN_SAMPLES=${TRAIN_SAMPLES:-131835938}

FLAGS=(
    --num-layers 105
    --hidden-size 20480
    --num-attention-heads 128
    --seq-length 2048
    --hidden-dropout 0
    --attention-dropout 0
    --init-method-std 0.004
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --zero-stage "$ZERO_STAGE"
    --micro-batch-size "$MICRO_BATCH_SIZE"
    --global-batch-size "$GLOBAL_BATCH_SIZE"
    --rampup-batch-size 32 32 5859375
    --train-samples "$TRAIN_SAMPLES"
    --lr 5.0e-5
    --min-lr 5.0e-6
    --lr-decay-style cosine
    --lr-warmup-samples 488281
    --lr-decay-samples 166015625
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --data-path "$DATA_PATH"
    --split "98,2,0"
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$VOCAB_FILE"
    --merge-file "$MERGE_FILE"
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --save-interval 300
    --async-save
    --keep-last 3
    --save-retain-interval 3000
    --eval-interval 1000
    --eval-iters 50
    --eval-from-start
    --log-interval 1
    --metrics-jsonl "$CHECKPOINT_PATH/metrics.jsonl"
)

if [[ -n ${VERIFY:-} ]]; then
    exec python -m megazero.cli verify --world-size $((GPUS_PER_NODE * NNODES)) --vocab-size 50257 "${FLAGS[@]}" "$@"
fi
launch pretrain_gpt.py "$@"
