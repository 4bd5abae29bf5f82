#!/bin/bash

# run  state
# run  pending
# asks for 4 nodes x 1 rank, no GPU: it trains on the CPU (add --gpus-per-node N for GPUs), 2 cores a rank, 240 minutes
# not checked by Slurm: there is no sbatch on this machine

# Parameters
#SBATCH --cpus-per-task=2
#SBATCH --job-name=debug-image
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=RUN_DIR/logs/%j_0_log.out
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --time=240
#SBATCH --wckey=submitit

# setup
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton_${SLURM_JOB_USER}_$SLURM_JOB_ID}
export PYTHONPATH=RUN_DIR/code/HASH${PYTHONPATH:+:$PYTHONPATH}
export PYTHONSAFEPATH=1
run_dirs=(RUN_DIR)
ranks=(srun --unbuffered --output=RUN_DIR/logs/%j_%t_log.out --cpus-per-task=2 --kill-on-bad-exit=1)
# The end of a batch script: train on all nodes, and start the ranks again if that helps. The lines before set
# run_dirs: the run directories, one for each member of the array
# ranks: the srun that starts all ranks, without the program

trap : TERM USR1 USR2  # a warning that also reaches this shell (scancel --full) does not end it; the ranks save and stop
unset SLURM_EXPORT_ENV # else ranks would lack the variables of this script if sbatch got --export=NONE

# The last member of an array has the array's own number as its SLURM_JOB_ID, which stands for all members.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
run_dir=${run_dirs[${SLURM_ARRAY_TASK_ID:-0}]}

most_restarts=10 # of the ranks within one start of the job; each must come after a new checkpoint

is_running() { [[ $(scontrol show job "$job") == *JobState=RUNNING* ]]; }
# --mem=0, because the step that has just ended may still hold the memory of the job.
answer() { timeout 60 srun --overlap --mem=0 --cpus-per-task=1 --nodes="$1" --ntasks="$1" "${@:2}" true; }
newest_checkpoint() { cat "$run_dir/LATEST" 2> /dev/null; }
has_stopped() { grep -qs '"ended": *"stopped"' "$run_dir/ended.json"; }
has_said_why() { [[ -e $run_dir/ended.json ]] || grep -aqs '^Timeout (' "$run_dir"/stalled/rank_*.txt; }

# If a node dies, srun ends before Slurm notices, because the other ranks lose the connection. This is not asked of a
# node that answers nothing at all: if the node of this script dies, Slurm starts the job again by itself.
a_node_is_dead() {
    answer 1 --nodelist="$SLURMD_NODENAME" && ! answer "$SLURM_JOB_NUM_NODES" --ntasks-per-node=1
}

requeue() {
    echo "$1: asking Slurm to start this job again; it goes on from the newest checkpoint"
    scontrol requeue "$job"
}

# Start the program "$@" as all ranks. Nothing starts again after an error in Python, a stall or scancel.
train() {
    local before status restarts=0
    while true; do
        before=$(newest_checkpoint)
        rm -rf "$run_dir/ended.json" "$run_dir/stalled"
        "${ranks[@]}" "$@"
        status=$?
        if has_stopped && is_running; then
            requeue "stopped as a signal asked" || status=1
            return $status
        fi
        if ((status == 0)) || has_said_why || ! is_running; then
            return $status
        fi
        if a_node_is_dead; then
            ((SLURM_RESTART_COUNT < 100)) && is_running && requeue "a node of this job does not answer"
            return $status
        fi
        echo "a rank died without a message (killed, or out of memory)"
        if [[ $(newest_checkpoint) == "$before" ]]; then
            echo "not started again, because this start has written no checkpoint"
            return $status
        fi
        if ((++restarts > most_restarts)); then
            echo "not started again, because this has happened $restarts times"
            return $status
        fi
        echo "starting all ranks again, number $restarts"
    done
}


# command
export SUBMITIT_EXECUTOR=slurm
train PYTHON -I -S RUN_DIR/code/HASH/launch/block_signals.py PYTHON -u -m submitit.core._submit RUN_DIR/logs

