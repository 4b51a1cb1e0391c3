#!/usr/bin/env bash
# A Llama-shaped model of 1.1 billion parameters: TP ranks share each layer, and the rest are replicas.
#
#   DATA_PATH=my_text_document TOKENIZER_MODEL=tokenizer.model bash scripts/pretrain_llama_1b.sh
#
# On several nodes run it on each, with NNODES, NODE_RANK and MASTER_ADDR set. Further flags follow the
# script's name and take precedence. CHECK=1 shows the resolved configuration, or every reason to refuse it,
# and starts nothing: this works without a GPU.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

TP=${TP:-2}

DATA_PATH=${DATA_PATH:-my_text_document}
TOKENIZER_MODEL=${TOKENIZER_MODEL:-tokenizer.model}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/llama_1b}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-4}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-512}
TRAIN_TOKENS=${TRAIN_TOKENS:-300000000000}

FLAGS=(
    --num-layers 22
    --hidden-size 2048
    --num-attention-heads 32
    --num-key-value-heads 4
    --ffn-hidden-size 5632
    --seq-length 2048
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --hidden-dropout 0
    --attention-dropout 0
    --tensor-model-parallel-size "$TP"
    --micro-batch-size "$MICRO_BATCH_SIZE"
    --global-batch-size "$GLOBAL_BATCH_SIZE"
    --train-tokens "$TRAIN_TOKENS"
    --lr 4e-4
    --min-lr 4e-5
    --lr-decay-style cosine
    --lr-warmup-tokens 2000000000
    --lr-decay-tokens "$TRAIN_TOKENS"
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --recompute-activations
    --data-path "$DATA_PATH"
    --split "99,1,0"
    --tokenizer-type GPTSentencePieceTokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --save-interval 2000
    --eval-interval 2000
    --eval-iters 20
    --eval-from-start
    --log-interval 10
    --metrics-jsonl "$CHECKPOINT_PATH/metrics.jsonl"
)
if ((TP > 1)); then FLAGS+=(--sequence-parallel); fi

launch pretrain_gpt.py "$@"
