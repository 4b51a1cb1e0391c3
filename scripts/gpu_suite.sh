#!/usr/bin/env bash
# Every check that needs a GPU, in one call of less than 8 minutes on one GPU:
#
#   bash scripts/gpu_suite.sh
#   bash scripts/gpu_suite.sh --dry-run     # its steps on the CPU, small, with nothing installed
#
# What the machine has; csrc for the GPU; the tests marked `gpu`: operators against their references, NCCL, staging
# of checkpoints; a short quickstart in bf16; a run that is saved and goes on; training steps of 124M, 1.3B and 6.7B
# shapes, plain, compiled, as graphs and in fp8, and beside plain PyTorch; the kernels' rates. Results go to $OUT, or
# benchmarks/results/, as JSON lines. After a failure it goes on, and ends with status 1. The dry run leaves out what has scripts for
# the CPU of its own: the quickstart, and the steps beside PyTorch's.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

dry=''
case ${1:-} in
    '') ;;
    -h | --help)
        sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    --dry-run) dry=1 ;;
    *)
        echo "error: the option must be --dry-run, --help or none, but is \`$1\`." >&2
        exit 2
        ;;
esac

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [[ -n $dry ]]; then
    OUT=${OUT:-$scratch/results} device=cpu steps=0 tests='tests/mpu/test_one_rank_world.py tests/layers/test_graphed.py'
    export SETUP_SKIP=1
    small=(--tiny --steps 1) slowness=6
else
    device=cuda steps=200 tests=tests small=() slowness=1
fi
results=$(mkdir -p "${OUT:-benchmarks/results}" && cd "${OUT:-benchmarks/results}" && pwd) || exit 1

SETUP_EXTRAS=plot SETUP_OPTIONAL=fast
. scripts/setup.sh
if [[ -z $dry ]]; then
    python - <<'PYTHON' || exit 1
import sys, torch
if not torch.cuda.is_available():
    sys.exit("error: the GPU suite must have a CUDA device, but torch sees none; --dry-run needs none.")
print(f"torch {torch.__version__} on {torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
PYTHON
fi

failed=()
check() {
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    echo
    echo "== $name"
    timeout "$((limit * slowness))" "$@" || failed+=("$name")
    echo "-- $((SECONDS - began)) s"
}

environment() {
    python -m megazero.cli env
    python -m megazero.cli env --json >"$results/gpu_env.json"
}
export -f environment
export results

# Saves in the middle, and goes on from there in another process.
run=(pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2
    --lr 1e-3 --mock-data --vocab-size 512 --bf16 --eval-iters 0 --save "$scratch/saved" --load "$scratch/saved"
    --save-interval 2 --train-iters 6 --device "$device")

marked=(-m gpu)
if [[ -n $dry ]]; then marked=(-n0); fi
check environment 10 bash -c environment
check csrc 40 bash scripts/check_csrc.sh
# shellcheck disable=SC2086
check tests 60 python -m pytest "${marked[@]}" $tests
# Where there is a GPU, the kernels' sweeps run on it too.
check "kernels' sweeps" 45 python -m pytest -n "$(nproc)" tests/kernels
if [[ -z $dry ]]; then
    check quickstart 70 bash scripts/quickstart.sh --steps "$steps" --dp 1 --out "$scratch"
fi
for name in loss.png metrics.jsonl metrics.eval.jsonl; do
    for found in "$scratch/steps-$steps"-*/"$name"; do
        if [[ -f $found ]]; then cp "$found" "$results/gpu_quickstart_${name//.eval/_eval}"; fi
    done
done
check "a run that is saved" 15 python "${run[@]}" --exit-interval 4
check "the same, gone on with" 15 python "${run[@]}" --check-host-waits warn
check "steps of three shapes" 85 python benchmarks/device_step.py --device "$device" ${small[@]+"${small[@]}"} \
    --seconds 65 --output "$results/gpu_device_step.jsonl"
if [[ -z $dry ]]; then
    check "a step beside PyTorch's" 40 python benchmarks/train_step.py --dtype bf16 --device cuda --rounds 3 \
        --contenders eager megazero --output "$results/gpu_train_step.jsonl"
    check "BERT's step" 30 python benchmarks/bert_step.py --dtype bf16 --device cuda --rounds 3 \
        --contenders plain megazero megazero-pack --output "$results/gpu_bert_step.jsonl"
fi
check "kernels' rates" 60 python benchmarks/kernels_gpu.py --device "$device" --rounds 3 \
    --output "$results/gpu_kernels.jsonl"

echo
if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
echo "all passed in $SECONDS s; results in $results"
