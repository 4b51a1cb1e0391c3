#!/usr/bin/env bash
# GPT-2 medium, 345 million parameters, data-parallel over the GPUs of one or more nodes.
#
#   DATA_PATH=my-gpt2_text_document VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt \
#       bash scripts/pretrain_gpt_345m.sh
#
# On several nodes run it on each, with NNODES, NODE_RANK and MASTER_ADDR set. Further flags follow the
# script's name and take precedence. CHECK=1 shows the resolved configuration, or every reason to refuse it,
# and starts nothing: this works without a GPU.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

DATA_PATH=${DATA_PATH:-my-gpt2_text_document}
VOCAB_FILE=${VOCAB_FILE:-gpt2-vocab.json}
MERGE_FILE=${MERGE_FILE:-gpt2-merges.txt}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/gpt_345m}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-8}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-512}
TRAIN_ITERS=${TRAIN_ITERS:-500000}

FLAGS=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 1024
    --max-position-embeddings 1024
    --micro-batch-size "$MICRO_BATCH_SIZE"
    --global-batch-size "$GLOBAL_BATCH_SIZE"
    --train-iters "$TRAIN_ITERS"
    --lr 1.5e-4
    --min-lr 1e-5
    --lr-decay-style cosine
    --lr-decay-iters 320000
    --lr-warmup-fraction 0.01
    --weight-decay 0.01
    --clip-grad 1.0
    --bf16
    --data-path "$DATA_PATH"
    --split "949,50,1"
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$VOCAB_FILE"
    --merge-file "$MERGE_FILE"
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --save-interval 10000
    --eval-interval 1000
    --eval-iters 10
    --eval-from-start
    --log-interval 100
    --tensorboard-dir "$CHECKPOINT_PATH/tensorboard"
)

launch pretrain_gpt.py "$@"
