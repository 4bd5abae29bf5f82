"""The job that submitit pickles: it names a run directory and holds nothing else that could grow old in the queue."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import submitit
from submitit.helpers import DelayedSubmission

from launch.train import run
from trainer.config import read_config
from trainer.rundir import open_run


@dataclass(frozen=True)
class TrainJob:
    """Trains the run in `run_dir` as one rank.

    Under Slurm the ranks find each other by Slurm's own variables; on one machine (submitit's local executor) they meet
    at `local_port`.
    """

    run_dir: Path
    command: str
    local_port: int

    def __call__(self) -> None:
        """Called by submitit in every task; a run that was cut short goes on from its LATEST checkpoint."""
        job = submitit.JobEnvironment()
        if job.cluster == "local":
            # CUDA_VISIBLE_DEVICES stays: every rank sees all GPUs and takes cuda:local_rank, as under torchrun.
            os.environ.update(
                RANK=str(job.global_rank),
                WORLD_SIZE=str(job.num_tasks),
                LOCAL_RANK=str(job.local_rank),
                LOCAL_WORLD_SIZE=str(job.num_tasks),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(self.local_port),
            )
        run(read_config(open_run(self.run_dir).config), self.run_dir, command=self.command)

    def checkpoint(self) -> DelayedSubmission:
        """Called by submitit on rank 0 alone when Slurm warns of preemption or of the time limit: asks to be requeued.

        No collective and no saving here, for the other ranks do not come along; the requeued job restarts from LATEST.
        """
        return DelayedSubmission(self)
