"""RUN_DIR/job.json: the Slurm job that trains a run, and its state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from pydantic import AwareDatetime, Field

from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import Schema
from launch.slurm_client import states_of_jobs
from trainer.run_dir import RunDir, read_object, write_json


class Submission(Schema):
    """The last Slurm job of a run. `log` is that of rank 0, into which Slurm also writes about the job."""

    job_id: str = Field(pattern=r"^[0-9]+(_[0-9]+)?$")
    submitted_at: AwareDatetime
    log: Path


def record(run_dir: RunDir, submission: Submission) -> None:
    write_json(run_dir.path / "job.json", submission.model_dump(mode="json"))


def last_submission(run_dir: RunDir) -> Submission | None:
    """Return the last submission of a run; None if there is none. Raises `UserError` if its file is damaged."""
    path = run_dir.path / "job.json"
    if not path.is_file():
        return None
    return Submission.parse(read_object(path, mend="remove it, and end its job by hand with scancel"), where=str(path))


def queue_for(run_dirs: Iterable[RunDir]) -> dict[str, str] | None:
    """Return `states_of_jobs` of these runs, without asking Slurm if none of them was submitted."""
    job_ids = []
    for run_dir in run_dirs:
        with contextlib.suppress(UserError):  # the status of this run says it
            submission = last_submission(run_dir)
            if submission is not None:
                job_ids.append(submission.job_id)
    return states_of_jobs(job_ids) if job_ids else {}
