#!/usr/bin/env bash
# Every check that needs a GPU, in three calls of less than 8 minutes each on one GPU, in this order:
#
#   bash scripts/gpu_suite.sh correct       # does it compute what a CPU computes?
#   bash scripts/gpu_suite.sh steps         # how fast is a training step, and what is it made of?
#   bash scripts/gpu_suite.sh kernels       # how fast are kernels and products of 8-bit floats? And the quickstart
#   bash scripts/gpu_suite.sh               # all three in turn
#
# All that a call has to say is in one archive, gpu_correct.tar.gz and so on, in $OUT, or out/: its log, JSON lines,
# traces, pictures. It is written anew after each check, so it is there whatever ends the call. After a failure the call
# goes on, and ends with status 1. What one call builds (csrc, the kernels for this device, what torch compiles) the next
# one finds in build/.
#
#   bash scripts/gpu_suite.sh wheels [NAME...]   # beforehand, with a network, for a GPU machine without one
#
# fetches what such a machine may lack, for its Python 3.12, into .wheels/. Where that folder is, calls install from it
# alone; what is installed already stays.
#
#   bash scripts/gpu_suite.sh [CALL] --dry-run   # the same on the CPU, small, with nothing installed
#   bash scripts/gpu_suite.sh [CALL] --brief     # likewise, and a few rows alone
#
# GPU_SUITE_SLOWNESS  all limits are so many times as long; by default 1, and 8 in a dry run
# GPU_SUITE_SECONDS   the seconds that a call may take; by default 475 times that
#
# The dry run leaves out what has scripts for the CPU of its own: the quickstart, the steps beside PyTorch's, and most
# of the kernels' sweeps.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

# With what they need, in the versions of constraints.txt. Two versions of one would be too many.
wheels() {
    local names=("$@") platform platforms=()
    if ((!$#)); then names=(pydantic sentencex); fi
    for platform in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux_2_12 manylinux_2_5; do
        platforms+=(--platform "${platform}_x86_64")
    done
    rm -rf .wheels
    python3 -m pip download --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
        --constraint constraints.txt --dest .wheels "${names[@]}"
}

call='' dry='' brief=''
while (($#)); do
    case $1 in
        -h | --help)
            sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --dry-run) dry=1 ;;
        --brief) dry=1 brief=1 ;;
        correct | steps | kernels) call=$1 ;;
        wheels)
            wheels "${@:2}"
            exit
            ;;
        *)
            echo "error: the call must be correct, steps, kernels or wheels, and the option --dry-run, --brief or --help," \
                "but one is \`$1\`." >&2
            exit 2
            ;;
    esac
    shift
done
if [[ -z $call ]]; then
    status=0
    for call in correct steps kernels; do
        bash "${BASH_SOURCE[0]}" "$call" ${dry:+--dry-run} ${brief:+--brief} || status=1
    done
    exit "$status"
fi

OUT=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd) || exit 1
scratch=$(mktemp -d) || exit 1
results=$scratch/gpu_$call
mkdir "$results"
: >"$results/log.txt"
# A dry run may take its time: machines without a GPU are slow, and busy with other things.
slowness=${GPU_SUITE_SLOWNESS:-${dry:+8}}
slowness=${slowness:-1}
ends=${GPU_SUITE_SECONDS:-$((475 * slowness))} failed=() child=''

exec 3>&1 4>&2 > >(trap '' INT TERM HUP && exec tee "$results/log.txt") 2>&1
logger=$!

# The archive appears whole or not at all; that the log grows meanwhile is no error.
pack() {
    tar -C "$scratch" -czf "$scratch/packed" "gpu_$call" 2>/dev/null
    if (($? <= 1)); then mv "$scratch/packed" "$OUT/gpu_$call.tar.gz"; fi
}

finish() {
    local status=$? waits
    trap '' INT TERM HUP
    if [[ -n $child ]]; then kill -TERM "$child" 2>/dev/null; fi
    echo
    if ((${#failed[@]})); then
        printf 'failed: %s\n' "${failed[@]}"
        if ((!status)); then status=1; fi
    elif ((!status)); then
        echo "$call: all passed in $SECONDS s"
    fi
    echo "results in $OUT/gpu_$call.tar.gz"
    exec >&3 2>&4
    for waits in {1..40}; do
        kill -0 "$logger" 2>/dev/null || break
        sleep 0.05
    done
    pack
    rm -rf "$scratch"
    exit "$status"
}
trap finish EXIT
for signal in INT:130 TERM:143 HUP:129; do
    # shellcheck disable=SC2064
    trap "failed+=('stopped by SIG${signal%:*}'); exit ${signal#*:}" "${signal%:*}"
done

# check NAME SECONDS COMMAND...; it gets no more than what is left of the call, and with `rest` all of that.
check() {
    local name=$1 limit=$2 began=$SECONDS left=$((ends - SECONDS)) status
    shift 2
    if [[ $limit == rest ]]; then limit=$left; else limit=$((limit * slowness)); fi
    if ((limit > left)); then limit=$left; fi
    echo
    echo "== $name"
    if ((limit <= 0)); then
        failed+=("$name: no time was left")
        return 1
    fi
    # In the background, since a signal is not answered while a command in the foreground runs. What it leaves
    # running must not hold the caller's output open.
    timeout --kill-after=5 "$limit" "$@" 3>&- 4>&- &
    child=$!
    wait "$child"
    status=$?
    child=''
    if ((status == 124 || status == 137)); then echo "it did not end within $limit s"; fi
    if ((status)); then failed+=("$name"); fi
    echo "-- $((SECONDS - began)) s"
    pack
    return "$status"
}

export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export TORCHINDUCTOR_CACHE_DIR=$PWD/build/inductor TRITON_CACHE_DIR=$PWD/build/triton
if [[ -n $dry ]]; then
    device=cpu tiny=(--tiny --steps 1)
else
    device=cuda tiny=()
    export SETUP_EXTRAS=plot PIP_RETRIES=1 PIP_TIMEOUT=15
    if compgen -G '.wheels/*.whl' >/dev/null; then
        export SETUP_WHEELS=$PWD/.wheels
    else
        export SETUP_OPTIONAL=fast
    fi
    # Kernels are built below, for this device alone.
    check setup 90 env MEGAZERO_CUDA=0 bash -c '. scripts/setup.sh' || exit 1
    . scripts/setup.sh
    check "the kernels for this device" 45 python -c '
import sys, torch
if not torch.cuda.is_available():
    print("error: the GPU suite must have a CUDA device, but torch sees none; --dry-run needs none.")
    sys.exit(2)
print(f"torch {torch.__version__} on {torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
from megazero.ops.cuda import cuda_kernels
print(cuda_kernels().path)
'
    if (($? == 2)); then exit 2; fi
fi
export SETUP_SKIP=1

environment() {
    python -m megazero.cli env && python -m megazero.cli env --json >"$results/env.json"
}
export -f environment
export results

correct() {
    local rows=(--seconds 165) marked pick=(-m gpu) workers=4
    mapfile -t marked < <(grep -rl 'mark\.gpu' tests --include='test_*.py' | sort)
    if [[ -n $dry ]]; then
        workers=2 rows=(--dry-run --workers 2 --seconds $((165 * slowness))) pick=(-n0) marked=(tests/layers/test_graphed.py)
    fi
    if [[ -n $brief ]]; then workers=0 rows+=(--workers 1 --only masks "zero 3 = 0, bf16" "graphs = launches, bf16"); fi
    check "the device against a CPU, features against none" 170 \
        python proofs/device_agrees.py "${rows[@]}" --output "$results/agrees.jsonl"
    check "operators against their references" 45 \
        python -m pytest -n "$workers" --device "$device" --slow tests/ops/test_sweep.py \
        -k "not every_dtype${brief:+ and squared_relu}" # each operator, which the default suite takes in turns
    if [[ -z $brief ]]; then
        check "tests that are marked gpu" 45 python -m pytest "${pick[@]}" "${marked[@]}"
        # Where there is a GPU, the kernels' sweeps run on it too. Their imitation on a CPU takes minutes.
        check "kernels against their formulas" 45 python -m pytest -n "$(nproc)" "tests/kernels${dry:+/test_swiglu.py}"
        check environment 25 bash -c environment
    fi
}

# Saves in the middle, and goes on from there in another process.
saved_run() {
    python pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 \
        --lr 1e-3 --mock-data --vocab-size 512 --bf16 --eval-iters 0 --save "$scratch/saved" --load "$scratch/saved" \
        --save-interval 2 --train-iters 6 --device "$device" "$@"
}
export -f saved_run
export scratch device

steps() {
    local shapes=(124M 350M 1.3B) lines=$results/device_step.jsonl steps=(python benchmarks/device_step.py)
    if [[ -n $brief ]]; then shapes=(124M); fi
    steps+=(--device "$device" ${tiny[@]+"${tiny[@]}"} --shapes "${shapes[@]}" --output "$lines")
    check "plain steps" 80 "${steps[@]}" --ways plain --seconds $((75 * slowness)) --trace "$results/traces"
    if [[ -z $brief ]]; then
        check "steps as graphs and in fp8" 60 "${steps[@]}" --ways graphs fp8 --seconds $((55 * slowness))
        check "attention's backends" 30 python benchmarks/device_parts.py --parts attention --device "$device" \
            --shapes "${shapes[@]}" ${dry:+--tiny} --seconds $((25 * slowness)) --output "$results/attention.jsonl"
    fi
    check "a run that is saved" 20 bash -c 'saved_run --exit-interval 4'
    check "the same, gone on with" 20 bash -c 'saved_run --check-host-waits warn'
    if [[ -z $dry ]]; then
        check "a step beside PyTorch's" 40 python benchmarks/train_step.py --dtype bf16 --device cuda --shape 124M \
            --rounds 3 --contenders eager megazero --output "$results/train_step.jsonl"
        check "BERT's step" 45 python benchmarks/bert_step.py --dtype bf16 --device cuda --shape 110M --rounds 3 \
            --contenders plain megazero megazero-pack --output "$results/bert_step.jsonl"
    fi
    if [[ -z $brief ]]; then
        check "compiled steps" rest "${steps[@]}" --ways compiled fp8-compiled --seconds $((ends - SECONDS - 5))
    fi
}

quickstart() {
    local folder=$scratch/quickstart file status=0
    bash scripts/quickstart.sh --steps 100 --dp 1 --out "$folder" || status=1
    for file in "$folder"/steps-*/{loss.png,metrics.jsonl,metrics.eval.jsonl}; do
        if [[ -f $file ]]; then cp "$file" "$results/quickstart_${file##*/}"; fi
    done
    return "$status"
}
export -f quickstart

kernels() {
    local rates=(--device "$device" --rounds 3 --seconds $((195 * slowness)))
    if [[ -n $brief ]]; then rates+=(--only swiglu); fi
    check "kernels' rates" 200 python benchmarks/kernels_gpu.py "${rates[@]}" --output "$results/kernels.jsonl"
    if [[ -z $brief ]]; then
        check "8-bit floats beside bf16" 60 python benchmarks/device_parts.py --parts linear --device "$device" \
            ${dry:+--tiny} --seconds $((55 * slowness)) --output "$results/linear.jsonl"
    fi
    if [[ -z $dry ]]; then check quickstart 60 bash -c quickstart; fi
}

"$call"
((!${#failed[@]}))
