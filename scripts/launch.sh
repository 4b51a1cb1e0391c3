# shellcheck shell=bash
# What all launchers share. They source this file first, with their own arguments, and call `launch` last:
#
#   . "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
#   FLAGS=(--num-layers 24 ...)
#   launch pretrain_gpt.py "$@"
#
# `--help` shows the comment at the head of the launcher. `launch` checks everything that one node can check (flags,
# files, GPUs, addresses) before it waits for any other node.

launch_script=${BASH_SOURCE[1]} launch_name=$(basename "${BASH_SOURCE[1]}")
for word in "$@"; do
    if [[ $word == --help || $word == -h ]]; then
        awk 'NR == 1 { next } /^#/ { sub(/^# ?/, ""); print; next } { exit }' "$launch_script"
        printf '\nThe training has flags of its own: python pretrain_gpt.py --help lists them.\n'
        exit 0
    fi
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z ${VIRTUAL_ENV:-} && -x .venv/bin/python ]]; then PATH=$PWD/.venv/bin:$PATH; fi

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
if [[ $NNODES == 1 ]]; then MASTER_PORT=${MASTER_PORT:-0}; fi # any that is free
MASTER_PORT=${MASTER_PORT:-6000}
for name in GPUS_PER_NODE NNODES; do
    if ! [[ ${!name} =~ ^[1-9][0-9]*$ ]]; then
        echo "error: \`$name\` must be a positive integer, but is \`${!name}\`." >&2
        exit 2
    fi
done

# Usage: launch ENTRY [flag ...], where ENTRY is pretrain_gpt.py or pretrain_bert.py. FLAGS come before the flags given.
launch() {
    local entry=$1
    shift
    if [[ -n ${CHECK:-} ]]; then
        WORLD_SIZE=$((GPUS_PER_NODE * NNODES)) exec python "$entry" "${FLAGS[@]}" --check-config "$@"
    fi
    local family=() prefix=()
    if [[ $entry == pretrain_bert.py ]]; then family=(--model-family bert); fi
    local plan=(python -m megazero.cli plan --nproc $((GPUS_PER_NODE * NNODES)) --gpus-per-node "$GPUS_PER_NODE"
        --device "${PLAN_DEVICE:-h100}" -- ${family[@]+"${family[@]}"} "${FLAGS[@]}" "$@")
    if [[ -n ${PLAN:-} ]]; then exec "${plan[@]}"; fi
    if ! python -m megazero.env.launch_check --gpus-per-node "$GPUS_PER_NODE" --nnodes "$NNODES" \
        --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --script "$launch_name" -- \
        ${family[@]+"${family[@]}"} "${FLAGS[@]}" "$@"; then
        # Nothing is wrong with the settings: then this is what the job would be.
        if WORLD_SIZE=$((GPUS_PER_NODE * NNODES)) python "$entry" "${FLAGS[@]}" --check-config "$@" > /dev/null 2>&1; then
            printf '\nOn the machines that it needs:\n\n'
            "${plan[@]}" || true
        fi
        exit 2
    fi
    if [[ $NNODES == 1 ]]; then prefix=(--no-prefix); fi
    # Signals, exit statuses and the list of missing nodes are those of docs/launch.md.
    exec python -m megazero.cli launch --no-ssh --num-nodes "$NNODES" --node-rank "$NODE_RANK" --num-gpus "$GPUS_PER_NODE" \
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --no-local-rank ${prefix[@]+"${prefix[@]}"} \
        "$entry" "${FLAGS[@]}" "$@"
}
