"""Run the commands of Slurm, read their output, and hide the variables of a job that this process is in."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator

from submitit.helpers import clean_env

from data_pipeline.core.errors import UserError

SLURM_SECONDS = 120  # for one command of Slurm
_ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
_ENDED |= {"REVOKED", "TIMEOUT"}


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


def states_of_jobs(job_ids: Iterable[str]) -> dict[str, str] | None:
    """Return the state of each of these jobs that Slurm knows, such as "PENDING (Priority)"; None without squeue.

    Each job of an array has an id of its own, such as 12_3, and its whole array is in the answer. Asks slurmctld, which
    forgets a job some minutes after its end, and for the others the accounting, which many clusters lack. Raises
    `UserError` if squeue gives no answer.
    """
    if shutil.which("squeue") is None:
        return None
    wanted = set(job_ids)
    jobs = ",".join(sorted({job_id.partition("_")[0] for job_id in wanted}))
    done = run_slurm("squeue", "--noheader", "--array", "--states=all", "--jobs", jobs, "--format", "%i|%T|%r")
    if done.returncode and "Invalid job id" not in done.stderr:  # as it says of a single job that ended long ago
        raise UserError(f"squeue failed ({' '.join(done.stderr.split())}); try again when Slurm answers")
    lines = done.stdout.splitlines()
    if unknown := wanted - {line.partition("|")[0].strip() for line in lines}:
        asked = ("--noheader", "--allocations", "--parsable2", "--jobs", ",".join(sorted(unknown)))
        if shutil.which("sacct") is not None:
            with contextlib.suppress(UserError):
                said = run_slurm("sacct", "--format=JobID,State", *asked).stdout
                lines += [f"{line.partition(' ')[0]}|None" for line in said.splitlines()]
    found = {}
    for line in lines:
        job_id, state, reason = (part.strip() for part in line.split("|", 2))
        found[job_id] = state if reason == "None" else f"{state} ({reason})"
    return found


def has_ended(state: str) -> bool:
    """Return whether a job in this state of `states_of_jobs` is over."""
    return state.partition(" ")[0] in _ENDED


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
        done = run_slurm("sbatch", "--test-only", *options_in(script), text=script)
    if done.returncode and "down, drained or reserved" not in done.stderr:
        raise refused(done.stderr)


def refused(said: str) -> UserError:
    """Return the error for a job that sbatch did not take, with what it said."""
    reason = " ".join(said.split()) or "it gave no reason"
    return UserError(
        f"sbatch refused the job ({reason}); change the request, or find out with sinfo what there is. If Slurm did "
        "not answer, look with squeue whether it has taken the job all the same"
    )


def options_in(script: str) -> list[str]:
    """Return the options that a batch script has, for sbatch's command line, where they overrule SBATCH_... variables.

    Without that, such a variable would overrule the script.
    """
    return [option for line in re.findall("^#SBATCH (.+)$", script, re.MULTILINE) for option in shlex.split(line)]


@contextlib.contextmanager
def outside_any_job() -> Iterator[None]:
    """Hide the variables of a Slurm job or of torchrun, which a new job would inherit.

    Keeps SBATCH_... variables, which a site sets for its users, and SLURM_CONF, which names the cluster.
    """
    kept = {name: value for name, value in os.environ.items() if name.startswith("SBATCH_") or name == "SLURM_CONF"}
    with clean_env(extra_names=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")):
        os.environ.update(kept)
        yield
