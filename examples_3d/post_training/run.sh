#!/usr/bin/env bash
# From the quickstart's GPT to one that answers questions: chats, preferences, policy gradients.
#
#   bash scripts/quickstart.sh                        # first, if it has not run
#   bash examples_3d/post_training/run.sh [QUICKSTART] [OUT]
#
# QUICKSTART is the quickstart's folder (default out/quickstart), OUT gets everything (default out/post_training).
# What exists already is used again. Some ten minutes on two cores.
set -euo pipefail
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 0
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
quickstart=${1:-out/quickstart} out=${2:-out/post_training}
if [[ -f .venv/bin/activate ]]; then . .venv/bin/activate; fi
python=${PYTHON:-python}

base=$(ls -td "$quickstart"/steps-*/ 2>/dev/null | head -n 1 || true)
if [[ -z $base || ! -f $quickstart/tokenizer/tokenizer.json ]]; then
    echo "error: \`$quickstart\` must hold the quickstart's run and tokenizer, but does not; run bash scripts/quickstart.sh" >&2
    exit 2
fi
mkdir -p "$out"
data=$out/data tokenizer=$out/tokenizer
if [[ ! -f $data/prompts.jsonl ]]; then "$python" "$here/make_data.py" --output "$data"; fi
# A tokenizer of transformers finds its chat template beside itself.
mkdir -p "$tokenizer"
cp "$quickstart/tokenizer/tokenizer.json" "$here/chat_template.jinja" "$tokenizer/"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} TOKENIZERS_PARALLELISM=false PYTHONPATH=$PWD
model=(--num-layers 4 --hidden-size 192 --num-attention-heads 6 --seq-length 128
    --hidden-dropout 0 --attention-dropout 0
    --tokenizer-type HFTokenizer --tokenizer-model "$tokenizer/tokenizer.json")

# train NAME COMMAND FLAGS...: a stage that is done is not run again, and one that was stopped goes on.
train() {
    local save=$out/$1
    shift
    if [[ -f $save/done ]]; then
        echo "$save is there"
        return
    fi
    "$python" -m megazero.cli "$@" "${model[@]}" --save "$save" --load "$save" --save-interval 50
    touch "$save/done"
}

echo "== chats"
train chat finetune --task chat --train-data "$data/chat_train.jsonl" --valid-data "$data/chat_valid.jsonl" \
    --pretrained-checkpoint "$base" --epochs 2 --micro-batch-size 16 --global-batch-size 16 \
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 10 --weight-decay 0 --log-interval 20

echo "== preferences: terse answers before wordy ones"
train preference finetune --task preference --train-data "$data/pairs_train.jsonl" --valid-data "$data/pairs_valid.jsonl" \
    --pretrained-checkpoint "$out/chat" --epochs 1 --micro-batch-size 8 --global-batch-size 16 \
    --preference-loss sigmoid --preference-beta 0.1 --preference-sft-coeff 1 --lr 1e-4 --lr-decay-style constant --weight-decay 0 --log-interval 5 \
    --save-hf "$out/preference-hf"

echo "== policy gradients: right answers"
train policy rl --policy-method grpo --prompts "$data/prompts.jsonl" --reward-functions "$here/rewards.py:right" \
    --load-hf "$out/preference-hf" --group-size 8 --max-answer-tokens 16 \
    --micro-batch-size 64 --global-batch-size 128 --train-iters 120 \
    --lr 1e-4 --adam-beta2 0.99 --lr-warmup-iters 5 --lr-decay-style constant --weight-decay 0 --log-interval 10

echo "== before and after"
"$python" "$here/compare.py" --data "$data" --tokenizer "$tokenizer" --output "$out" \
    "chats=$out/chat" "preferences=$out/preference" "policy gradients=$out/policy"
