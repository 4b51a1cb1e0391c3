#!/usr/bin/env bash
# A small GPT learns at 256 tokens, and goes on at 2,048: YaRN, packed documents, and a sequence over several ranks.
# What exists already is used again. README.md says what to expect.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash examples_3d/long_context/run.sh [--cp N] [--short-steps N] [--long-steps N] [--out DIR]

  --cp N            ranks that share each sequence of the longer training (default 1)
  --short-steps N   steps of 2,048 tokens at 256 tokens (default 1000)
  --long-steps N    steps of 8,192 tokens at 2,048 tokens (default 200)
  --out DIR         where everything is written (default out/long_context)
TEXT
}

refuse() {
    echo "error: $*" >&2
    echo "       bash examples_3d/long_context/run.sh --help lists the options" >&2
    exit 2
}

cp=1 short_steps=1000 long_steps=200 out=out/long_context
while (($#)); do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --cp | --short-steps | --long-steps | --out)
            (($# > 1)) || refuse "\`$1\` must have a value, but is the last word."
            [[ $1 == --out || $2 =~ ^[1-9][0-9]*$ ]] || refuse "\`$1\` must be a positive integer, but is \`$2\`."
            case $1 in
                --cp) cp=$2 ;;
                --short-steps) short_steps=$2 ;;
                --long-steps) long_steps=$2 ;;
                --out) out=$2 ;;
            esac
            shift 2
            ;;
        *) refuse "the option must be one of those that --help lists, but is \`$1\`." ;;
    esac
done
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
stage() { echo && echo "== $1, after $SECONDS s"; }

stage "set-up"
SETUP_EXTRAS=plot . scripts/setup.sh
passkey=examples_3d/long_context/passkey.py
tokenizer=$out/tokenizer/tokenizer.json
tokenize=(--tokenizer-type HFTokenizer --tokenizer-model "$tokenizer")
text=(--corpus "$out/corpus.jsonl" --tokenizer "$tokenizer")

stage "data: source code, and documents that hide pass keys"
if [[ ! -f $out/prompts.txt ]]; then
    python data_tools/corpora/make_corpus.py --output "$out/corpus.jsonl" --max-mb 8
    python "$passkey" words --output "$out/words.jsonl"
    python data_tools/train_tokenizer.py --input "$out/corpus.jsonl" "$out/words.jsonl" --output "$out/tokenizer" --vocab-size 1024
    python "$passkey" documents "${text[@]}" --tokens 240 --count 12000 --output "$out/keys256.jsonl"
    python "$passkey" documents "${text[@]}" --tokens 2040 --count 1600 --output "$out/keys2048.jsonl" --seed 2
    for name in corpus keys256 keys2048; do
        python data_tools/preprocess_data.py --input "$out/$name.jsonl" --output-prefix "$out/$name" "${tokenize[@]}" --append-eod
    done
    python "$passkey" prompts "${text[@]}" --distances 50 100 200 500 1000 2000 --count 20 --output "$out/prompts.txt"
fi
python data_tools/inspect_dataset.py "$out/keys2048_text_document" --pack 2048

# Both trainings. A document is never cut that fits into a sequence, and sees no other.
shape=(--num-layers 2 --hidden-size 128 --num-attention-heads 4 --hidden-dropout 0 --attention-dropout 0
    --rotary-base 1000 --init-method-std 0.05 "${tokenize[@]}" --split 96,4,0
    --pack best-fit --reset-attention-mask --reset-position-ids)
learning=(--lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95 --eval-iters 0 --log-interval 50)

stage "a model of 256 tokens"
short=$out/short
if [[ ! -f $short/latest_checkpointed_iteration.txt ]]; then
    python pretrain_gpt.py "${shape[@]}" "${learning[@]}" --seq-length 256 --position-embedding-type rope \
        --data-path 0.3 "$out/corpus_text_document" 0.7 "$out/keys256_text_document" \
        --micro-batch-size 8 --global-batch-size 8 --train-iters "$short_steps" \
        --lr 4e-3 --min-lr 4e-4 --lr-warmup-iters 50 --save "$short"
fi

# What changes: the length, and YaRN, which slows down the channels that turn less than once in 256 tokens.
# --extend-context says that this is meant; without it, the checkpoint is one of another model.
stage "the same model at 2,048 tokens"
long=$out/long
yarn=(--seq-length 2048 --position-embedding-type yarn --rotary-scaling-factor 8 --yarn-original-max-position-embeddings 256)
mixture=(--data-path 0.3 "$out/corpus_text_document" 0.7 "$out/keys2048_text_document")
if [[ ! -f $long/latest_checkpointed_iteration.txt ]]; then
    launch=(python)
    if ((cp > 1)); then
        launch=(python -m torch.distributed.run --standalone --nproc-per-node "$cp")
    fi
    "${launch[@]}" pretrain_gpt.py "${shape[@]}" "${learning[@]}" "${yarn[@]}" "${mixture[@]}" \
        --context-parallel-size "$cp" --micro-batch-size 2 --global-batch-size 4 --train-iters "$long_steps" \
        --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 10 --load "$short" --finetune --extend-context --save "$long"
fi

stage "loss by position on source code, before and after"
measure=("${shape[@]}" --data-path "$out/corpus_text_document" --micro-batch-size 2 --train-iters 1 --lr 1 --by-position 32)
python -m megazero.cli analyze-loss "${measure[@]}" --seq-length 2048 --position-embedding-type rope --extend-context \
    --load "$short" --name "at 256" --output "$out/loss-short" >/dev/null
python -m megazero.cli analyze-loss "${measure[@]}" "${yarn[@]}" --load "$long" --name "at 2,048" \
    --output "$out/loss" --beside "$out/loss-short/loss_by_position.json"

for name in short long; do
    stage "pass keys found by the $name model, at distances in tokens"
    python -m megazero.cli generate --load "$out/$name" --prompt-file "$out/prompts.txt" --greedy --max-new-tokens 2 \
        --prefill-chunk 512 >"$out/answers-$name.txt"
    python "$passkey" judge --prompts "$out/prompts.txt" --answers "$out/answers-$name.txt"
done
echo
echo "picture  $out/loss/loss_by_position.png"
echo "in all   $SECONDS s"
