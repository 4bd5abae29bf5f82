"""Run the commands of Slurm, read their output, and hide the variables of a job that this process is in."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator

from submitit.helpers import clean_env

from data_pipeline.core.errors import UserError

SLURM_SECONDS = 120  # for one command of Slurm


def has_slurm() -> bool:
    return shutil.which("sbatch") is not None and shutil.which("srun") is not None


def run_slurm(*command: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm with `text` as its input. Raises `UserError` if it gives no answer."""
    try:
        return subprocess.run(
            command,
            input=text,
            capture_output=True,
            timeout=SLURM_SECONDS,
            encoding="utf-8",
            errors="surrogateescape",  # a path keeps its bytes
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]} gave no answer within {SLURM_SECONDS} s; try again when Slurm answers") from None


def refused(said: str) -> UserError:
    """Return the error for a job that sbatch did not take, with what it said."""
    reason = " ".join(said.split()) or "it gave no reason"
    return UserError(
        f"sbatch refused the job ({reason}); change the request, or find out with sinfo what there is. If Slurm did "
        "not answer, look with squeue whether it has taken the job all the same"
    )


def queued_jobs(job_ids: Iterable[str]) -> dict[str, str] | None:
    """Return state and reason of those jobs that are in the queue, of any user, by id; None if there is no squeue.

    Each job of an array has an id of its own, such as 12_3, and its whole array is in the answer. Raises `UserError`
    if squeue gives no answer.
    """
    if shutil.which("squeue") is None:
        return None
    arrays = ",".join(sorted({job_id.partition("_")[0] for job_id in job_ids}))
    done = run_slurm("squeue", "--noheader", "--array", "--jobs", arrays, "--format", "%i|%T|%r")
    if done.returncode and "Invalid job id" in done.stderr:  # it ended long ago
        return {}
    if done.returncode:
        raise UserError(f"squeue failed ({' '.join(done.stderr.split())}); try again when Slurm answers")
    found = {}
    for line in done.stdout.splitlines():
        job_id, state, reason = (part.strip() for part in line.split("|", 2))
        found[job_id] = state if reason == "None" else f"{state} ({reason})"
    return found


def ended_state(job_id: str) -> str | None:
    """Return the state in which a job has ended, such as CANCELLED or OUT_OF_MEMORY; None if Slurm does not know.

    Asks slurmctld, which forgets a job some minutes after its end, and then the accounting, which many clusters lack.
    """
    for command in (
        ("scontrol", "show", "job", job_id),
        ("sacct", "--noheader", "--allocations", "--format=State%30", "--jobs", job_id),
    ):
        if shutil.which(command[0]) is None:
            continue
        with contextlib.suppress(UserError):
            states = re.findall(r"^\s*(?:JobState=)?([A-Z_]{4,})\b", run_slurm(*command).stdout, re.MULTILINE)
            if states:
                return str(states[0])
    return None


def check_script(script: str) -> None:
    """Ask Slurm, without submitting, whether it would take this batch script. Raises `UserError` if it refuses.

    Passes over nodes that are down at the moment, for which a job may wait.
    """
    if not has_slurm():
        raise UserError(
            "there is no Slurm on this machine (no sbatch and srun on PATH); run this on a login node of the cluster, "
            "add --dry-run to see the script, or --executor local to train here"
        )
    with outside_any_job():
        done = run_slurm("sbatch", "--test-only", text=script)
    if done.returncode and "down, drained or reserved" not in done.stderr:
        raise refused(done.stderr)


@contextlib.contextmanager
def outside_any_job() -> Iterator[None]:
    """Hide the variables of a Slurm job or of torchrun, which a new job would inherit."""
    # SLURM_CONF says which cluster, not which job; a site sets SBATCH_... for its users.
    kept = {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or name.startswith("SBATCH_")}
    with clean_env(extra_names=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")):
        os.environ.update(kept)
        yield
