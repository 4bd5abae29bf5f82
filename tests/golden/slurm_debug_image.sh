#!/bin/bash

# asks for 4 nodes x 1 rank, no GPU: it trains on the CPU (add --gpus-per-node N for GPUs), 2 cores a rank, 240 minutes
# not checked by Slurm: there is no sbatch on this machine
# time_minutes: 240 from default

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
trap : TERM USR1 USR2
unset SLURM_EXPORT_ENV
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONPATH=RUN_DIR/code/HASH${PYTHONPATH:+:$PYTHONPATH}
export PYTHONSAFEPATH=1

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output RUN_DIR/logs/%j_%t_log.out --cpus-per-task=2 --kill-on-bad-exit=1 PYTHON -I -S RUN_DIR/code/HASH/launch/block_signals.py PYTHON -u -m submitit.core._submit RUN_DIR/logs


# teardown
status=$?
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}; job=${job:-$SLURM_JOB_ID}
running() { [[ $(scontrol show job $job) == *JobState=RUNNING* ]]; }
answer() { timeout 60 srun --overlap --cpus-per-task=1 --nodes=$1 --ntasks=$1 "${@:2}" true; }
if ((status && SLURM_RESTART_COUNT < 100)) && running && answer 1 --nodelist=$SLURMD_NODENAME && ! answer $SLURM_JOB_NUM_NODES --ntasks-per-node=1 && running; then
    echo "a node of this job does not answer: asking Slurm to start it again, from the newest checkpoint"
    scontrol requeue $job
fi
exit $status
