#!/usr/bin/env bash
# BERT-large in Megatron's shape (24 layers, 336 million parameters), in two phases as Devlin et al. trained it:
# nine tenths of the steps on sequences of 128 tokens, the last tenth on 512, where the positions beyond 128 are
# learned.
#
#   DATA_PATH=my-bert_text_sentence VOCAB_FILE=bert-large-uncased-vocab.txt bash scripts/pretrain_bert_345m.sh
#   PHASE=2 DATA_PATH=... VOCAB_FILE=... bash scripts/pretrain_bert_345m.sh
#
# The data come from `preprocess_data.py --split-sentences`. The second phase loads the weights of the first and
# starts its optimizer and schedule anew; both continue where they stopped if run again. On several nodes run it
# on each, with NNODES, NODE_RANK and MASTER_ADDR set. Further flags follow the script's name and take
# precedence. CHECK=1 shows the resolved configuration, or every reason to refuse it, and starts nothing: this
# works without a GPU.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

PHASE=${PHASE:-1}
DATA_PATH=${DATA_PATH:-my-bert_text_sentence}
VOCAB_FILE=${VOCAB_FILE:-bert-large-uncased-vocab.txt}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/bert_345m}

# AdamW with Megatron's rates. For large batches with LAMB see examples_3d/bert_large_lamb_phase1.yaml.
case $PHASE in
    1)
        SEQ_LENGTH=128 MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-32} TRAIN_ITERS=${TRAIN_ITERS:-900000}
        SAVE=$CHECKPOINT_PATH/phase1
        START=(--load "$SAVE")
        ;;
    2)
        SEQ_LENGTH=512 MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-8} TRAIN_ITERS=${TRAIN_ITERS:-100000}
        SAVE=$CHECKPOINT_PATH/phase2
        START=(--load "$SAVE")
        # Until the second phase has a checkpoint of its own, it begins with the weights of the first.
        if [[ ! -e $SAVE/latest_checkpointed_iteration.txt ]]; then
            START=(--load "$CHECKPOINT_PATH/phase1" --finetune)
        fi
        ;;
    *)
        echo "error: \`PHASE\` must be 1 or 2, but is \`$PHASE\`." >&2
        exit 2
        ;;
esac

FLAGS=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length "$SEQ_LENGTH"
    --max-position-embeddings 512
    --micro-batch-size "$MICRO_BATCH_SIZE"
    --global-batch-size "${GLOBAL_BATCH_SIZE:-1024}"
    --train-iters "$TRAIN_ITERS"
    --lr 1e-4
    --min-lr 1e-5
    --lr-decay-style linear
    --lr-warmup-fraction 0.01
    --weight-decay 0.01
    --clip-grad 1.0
    --bf16
    --data-path "$DATA_PATH"
    --split "949,50,1"
    --tokenizer-type BertWordPieceLowerCase
    --vocab-file "$VOCAB_FILE"
    --save "$SAVE"
    "${START[@]}"
    --save-interval 10000
    --eval-interval 1000
    --eval-iters 10
    --eval-from-start
    --log-interval 100
    --tensorboard-dir "$SAVE/tensorboard"
)

launch pretrain_bert.py "$@"
