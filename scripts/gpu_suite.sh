#!/usr/bin/env bash
# Every check that needs a GPU, in one call of less than 8 minutes on one GPU:
#
#   bash scripts/gpu_suite.sh
#
# csrc for the GPU, the tests marked `gpu`, a short quickstart in bf16, and GPT's and BERT's training steps beside
# plain PyTorch. Results go to $OUT, or benchmarks/results/. After a failure it goes on, and ends with status 1.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
results=$(mkdir -p "${OUT:-benchmarks/results}" && cd "${OUT:-benchmarks/results}" && pwd) || exit 1

SETUP_EXTRAS=plot SETUP_OPTIONAL=fast
. scripts/setup.sh
python - <<'PYTHON' || exit 1
import sys, torch
if not torch.cuda.is_available():
    sys.exit("error: the GPU suite must have a CUDA device, but torch sees none.")
print(f"torch {torch.__version__} on {torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
PYTHON

failed=()
check() {
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    echo
    echo "== $name"
    timeout "$limit" "$@" || failed+=("$name")
    echo "-- $((SECONDS - began)) s"
}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
steps=200

check csrc 60 bash scripts/check_csrc.sh
check tests 120 python -m pytest -m gpu tests
check quickstart 150 bash scripts/quickstart.sh --steps "$steps" --out "$scratch"
for name in loss.png metrics.jsonl metrics.eval.jsonl; do
    for found in "$scratch/steps-$steps"-*/"$name"; do
        if [[ -f $found ]]; then cp "$found" "$results/gpu_quickstart_${name//.eval/_eval}"; fi
    done
done
check "training step" 90 python benchmarks/train_step.py --dtype bf16 --device cuda \
    --output "$results/gpu_train_step.jsonl"
check "BERT's step" 60 python benchmarks/bert_step.py --dtype bf16 --device cuda --rounds 5 \
    --contenders plain megazero megazero-pack --output "$results/gpu_bert_step.jsonl"

echo
if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
echo "all passed; results in $results"
