# shellcheck shell=bash
# What the batch scripts share: one task on each node, which starts the node's ranks with the script of the job.
#
# SIGUSR1 comes to this shell some time before the job's end (`#SBATCH --signal=B:USR1@...`); it is passed on to the ranks,
# which save and end, and the job is queued again. When the job is preempted, the ranks get SIGTERM from SLURM, save and
# end; a job that ends within the partition's grace counts as completed, so it is queued again here. A job that is
# cancelled gets the same signal, saves, and stays cancelled. docs/launch.md tells the rest.

# When SLURM preempted this job, in its words; `None` if it did not.
preempted() { scontrol show job --oneliner "$SLURM_JOB_ID" | sed -n 's/.* PreemptTime=\([^ ]*\).*/\1/p'; }

is_running() { [[ $(scontrol show job --oneliner "$SLURM_JOB_ID") == *" JobState=RUNNING "* ]]; }

train() {
    local script=$1 node step status requeue= before
    shift
    before=$(preempted)
    node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    # The address that SLURM itself uses for the first node; a name if there is no other.
    MASTER_ADDR=$(scontrol show node "$node" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
    NNODES=$SLURM_NNODES
    # srun hands it to all tasks; it is on no command line.
    MEGAZERO_LAUNCH_SECRET=${MEGAZERO_LAUNCH_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
    export MASTER_ADDR MASTER_PORT NNODES MEGAZERO_LAUNCH_SECRET
    # SLURM_NODEID must be expanded by each task, not here, where it is 0.
    # shellcheck disable=SC2016
    srun --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=60 --unbuffered \
        bash -c 'NODE_RANK=$SLURM_NODEID exec bash "$0" "$@"' "$script" "$@" &
    step=$!
    trap 'requeue=1; kill -USR1 "$step"' USR1
    trap : TERM # the tasks get it from SLURM; this shell waits for them
    while :; do
        status=0
        wait "$step" || status=$?
        kill -0 "$step" 2>/dev/null || break # a signal ends `wait`, not the step
    done
    if [[ $(preempted) != "$before" ]]; then
        requeue=1
    elif [[ $status != 0 ]]; then
        requeue=
    fi
    if [[ -n $requeue ]] && is_running; then
        echo "$script has ended with status $status before its work was done, and is queued again"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$status"
}
