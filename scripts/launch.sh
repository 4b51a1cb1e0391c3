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
if [[ -z ${NNODES:-}${CHECK:-}${PLAN:-} && -n ${SLURM_NNODES:-} ]]; then # a step of a SLURM job
    NNODES=$SLURM_NNODES
    NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}
    if [[ -z ${MASTER_ADDR:-} ]] && command -v scontrol > /dev/null; then
        MASTER_ADDR=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" | head -n 1)
    fi
fi
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
if ! [[ $NODE_RANK =~ ^[0-9]+$ ]]; then
    echo "error: \`NODE_RANK\` must be this node's number, from 0, but is \`$NODE_RANK\`." >&2
    exit 2
fi

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
    if [[ ${SLURM_NNODES:-$NNODES} != "$NNODES" ]]; then
        echo "$launch_name: this SLURM job has $SLURM_NNODES nodes, and NNODES is $NNODES" >&2
    fi
    python -m megazero.env.launch_check --gpus-per-node "$GPUS_PER_NODE" --nnodes "$NNODES" \
        --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --script "$launch_name" -- \
        ${family[@]+"${family[@]}"} "${FLAGS[@]}" "$@" || exit 2 # it has said why
    if [[ $NNODES == 1 ]]; then prefix=(--no-prefix); fi
    # Signals, exit statuses and the list of missing nodes are those of docs/launch.md.
    exec python -m megazero.cli launch --no-ssh --num-nodes "$NNODES" --node-rank "$NODE_RANK" --num-gpus "$GPUS_PER_NODE" \
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --no-local-rank ${prefix[@]+"${prefix[@]}"} \
        "$entry" "${FLAGS[@]}" "$@"
}
