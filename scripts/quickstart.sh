#!/usr/bin/env bash
# From nothing to a trained GPT: set-up, corpus, tokenizer, dataset, training, text, picture of the loss.
# What is there already is used again. Needs Python >= 3.10; a C++ compiler makes it faster.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash scripts/quickstart.sh [--steps N] [--nproc N] [--out DIR]

Trains a small GPT on the sources of Python's standard library and shows what it learned.

  --steps N    optimizer steps (default 250, or 100 on a CPU without bf16 instructions);
               below 100 the loss is shown but not judged
  --nproc N    ranks, each with a part of every batch (default: the GPUs, or 2 without any)
  --out DIR    where everything is written (default out/quickstart)
TEXT
}

refuse() {
    echo "error: $*" >&2
    echo "       bash scripts/quickstart.sh --help lists the options" >&2
    exit 2
}

steps='' nproc='' out=out/quickstart
while (($#)); do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --steps | --nproc | --out)
            (($# > 1)) || refuse "\`$1\` must have a value, but is the last word."
            case $1 in
                --steps) steps=$2 ;;
                --nproc) nproc=$2 ;;
                --out) out=$2 ;;
            esac
            shift 2
            ;;
        --steps=* | --nproc=* | --out=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
        *) refuse "the option must be --steps, --nproc or --out, but is \`$1\`." ;;
    esac
done
[[ -z $steps || $steps =~ ^[1-9][0-9]*$ ]] || refuse "\`--steps\` must be a positive integer, but is \`$steps\`."
[[ -z $nproc || $nproc =~ ^[1-9][0-9]*$ ]] || refuse "\`--nproc\` must be a positive integer, but is \`$nproc\`."
[[ -n $out ]] || refuse "\`--out\` must be a folder, but is empty."
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."

began=$SECONDS
stage_began=0
stage() {
    stage_began=$SECONDS
    echo
    echo "== $*"
}
stage_done() { echo "-- $((SECONDS - stage_began)) s"; }

stage "1/7 set-up"
SETUP_EXTRAS=plot SETUP_OPTIONAL=fast
. scripts/setup.sh
cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
nproc=${nproc:-$((gpus > 0 ? gpus : 2))}
# On a CPU without instructions for it, bf16 is slower than fp32.
precision=() default_steps=100
if ((gpus > 0)) || grep -qwsE 'amx_bf16|avx512_bf16|bf16' /proc/cpuinfo; then
    precision=(--bf16) default_steps=250
fi
steps=${steps:-$default_steps}
export OMP_NUM_THREADS=$((cores > nproc ? cores / nproc : 1))
stage_done

corpus=$out/corpus.jsonl tokenizer=$out/tokenizer/tokenizer.json data=$out/stdlib_text_document
run=$out/steps-$steps
metrics=$run/metrics.jsonl checkpoint=$run/checkpoint

stage "2/7 corpus: the standard library's sources"
if [[ -f $corpus ]]; then
    echo "$corpus is there"
else
    python data_tools/make_corpus.py --output "$corpus"
fi
stage_done

stage "3/7 tokenizer: byte-level BPE with 8192 tokens"
if [[ $tokenizer -nt $corpus ]]; then
    echo "$tokenizer is there"
else
    python data_tools/train_tokenizer.py --input "$corpus" --output "${tokenizer%/*}" --vocab-size 8192
fi
stage_done

stage "4/7 dataset: token ids in Megatron's format"
if [[ $data.idx -nt $tokenizer && -f $data.bin ]]; then
    echo "$data is there"
else
    python data_tools/preprocess_data.py --input "$corpus" --output-prefix "$out/stdlib" \
        --tokenizer-type HFTokenizer --tokenizer-model "$tokenizer" --append-eod --workers "$cores"
fi
stage_done

stage "5/7 training: $steps steps on $nproc ranks"
done_steps=$(cat "$checkpoint/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)
together=$((nproc * 8)) # sequences of one forward pass of all ranks
global_batch=$(((32 + together - 1) / together * together))
model=(--num-layers 6 --hidden-size 256 --num-attention-heads 8 --seq-length 256
    --hidden-dropout 0 --attention-dropout 0)
batch=(--micro-batch-size 8 --global-batch-size "$global_batch" --train-iters "$steps")
optimizer=(--lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters $((steps / 10))
    --weight-decay 0.1 --adam-beta2 0.95)
inputs=(--data-path "$data" --split "96,4,0" --tokenizer-type HFTokenizer --tokenizer-model "$tokenizer")
outputs=(--save "$checkpoint" --load "$checkpoint" --save-interval 50
    --eval-interval $((steps < 50 ? 10 : steps / 5)) --eval-iters 10
    --log-interval $((steps < 30 ? 1 : steps / 30)) --metrics-jsonl "$metrics")
if ((done_steps >= steps)); then
    echo "$checkpoint stands at step $done_steps; nothing is left to train"
else
    python -m torch.distributed.run --standalone --nproc-per-node "$nproc" pretrain_gpt.py \
        "${model[@]}" "${batch[@]}" "${optimizer[@]}" ${precision[@]+"${precision[@]}"} \
        "${inputs[@]}" "${outputs[@]}"
fi
stage_done

stage "6/7 what was learned"
entropy=$(python data_tools/inspect_dataset.py "$data" --unigram-entropy --json |
    python -c 'import json, sys; print(json.load(sys.stdin)["unigram_entropy"])')
python scripts/plot_loss.py "$metrics" --output "$run/loss.png" --unigram-entropy "$entropy"
verdict=0
python scripts/compare_loss.py "$metrics" --unigram-entropy "$entropy" --judge-from-step 100 || verdict=$?
stage_done

stage "7/7 text from the model"
python -m megazero.cli generate --load "$checkpoint" --prompt "def main(" \
    --max-new-tokens 80 --temperature 0.8 --top-p 0.95 --seed 1
stage_done

echo
echo "checkpoint  $checkpoint"
echo "metrics     $metrics"
echo "picture     $run/loss.png"
echo "in all      $((SECONDS - began)) s"
exit "$verdict"
