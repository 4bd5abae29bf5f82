"""Start runs on this machine, follow submitted runs, list them, and submit them again."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import submitit

from data_pipeline.core.errors import UserError, printable
from launch.outcome import outcomes_of_job
from launch.planned_run import PlannedRun
from launch.preloaded import PreloadedProcess
from launch.slurm_client import queued_jobs
from launch.snapshot import read_snapshot
from launch.submission import SubmissionPlan, gpus_of, submit
from launch.submitted import (
    RunStatus,
    Submission,
    first_error,
    in_queue,
    last_submission,
    queue_for,
    refuse_if_active,
    run_status,
)
from trainer.config import read_run_config
from trainer.preflight import check_data
from trainer.run_dir import RunDir, is_held, runs_of

POLL_SECONDS = 1.0
POLL_HERE_SECONDS = 0.2  # between two looks at the runs of this machine; a place is empty for so long
HEADER = ("run", "state", "step", "loss", "reason")
MAX_REASON = 500  # characters that are shown
_NOT_TO_START: Final = frozenset({"finished", "waiting", "running"})


def still_to_do(plan: SubmissionPlan) -> tuple[list[PlannedRun], list[str]]:
    """Return the runs that are not finished and have no job, and a line for each other run."""
    queue = queue_for([planned.run_dir for planned in plan.runs])
    left, left_out = [], []
    for planned in plan.runs:
        status = run_status(planned.run_dir, queue) if planned.run_dir.config.is_file() else None
        if status is not None and status.state in _NOT_TO_START:
            left_out.append(f"{planned.run_dir.path.name} is {status.state} already")
        else:
            left.append(planned)
    return left, left_out


def run_study_here(plan: SubmissionPlan, *, command: str) -> None:
    """Train the runs on this machine, `at_a_time` at once, with the present code, and print each start and end.

    Leaves out the runs that another process finishes or trains meanwhile. If a run fails or cannot be started, the
    others go on, and this raises SystemExit(1) at the end. Raises `UserError` before any run starts if a run cannot use
    its data or its directory, or if there are too few GPUs.
    """
    gpus_of(plan.resources, slot=min(plan.at_a_time, len(plan.runs)) - 1)
    manifests = [check_data(planned.config) for planned in plan.runs]
    for each, found in zip(plan.runs, manifests, strict=True):
        if not is_held(each.run_dir):
            each.claim(found, accepted_data=plan.accepted_data)
    snapshot = read_snapshot(own_files=plan.own_files)
    waiting = deque(plan.runs)
    running: dict[int, tuple[PlannedRun, submitit.Job[None]]] = {}
    num_failed = 0
    started = time.monotonic()
    with PreloadedProcess() as preloaded:
        while waiting or running:
            for slot in range(plan.at_a_time):
                if slot in running and running[slot][1].done():
                    ended, _ = running.pop(slot)
                    status = status_of(ended.run_dir, {})
                    num_failed += status.state not in _NOT_TO_START
                    _print_status(ended.run_dir.path, status)
                if slot not in running and (planned := _next_to_start(waiting)) is not None:
                    name = planned.name
                    try:
                        one = replace(plan, runs=[planned], slot=slot)
                        (job,) = submit(one, command=command, snapshot=snapshot, preloaded=preloaded)
                    except (UserError, OSError) as error:  # such as a disk that has become full
                        num_failed += 1
                        print(f"{name}: not started: {error}", file=sys.stderr, flush=True)
                        continue
                    running[slot] = planned, job
                    num_ended = len(plan.runs) - len(waiting) - len(running)
                    left = _time_left(time.monotonic() - started, done=num_ended, of=len(plan.runs))
                    print(f"{name}: job {job.job_id}, {len(waiting)} to come{left}", flush=True)
            time.sleep(POLL_HERE_SECONDS)
    if num_failed:
        print(
            f"error: {num_failed} of {len(plan.runs)} run(s) did not finish; repeat the command to go on with them",
            file=sys.stderr,
        )
        raise SystemExit(1)


def _next_to_start(waiting: deque[PlannedRun]) -> PlannedRun | None:
    """Take the next run that no other process trains or has finished, and print the states of the others."""
    while waiting:
        planned = waiting.popleft()
        state = status_of(planned.run_dir, {}).state
        if state not in _NOT_TO_START:
            return planned
        print(f"{planned.name} is {state} already", flush=True)
    return None


def _time_left(seconds: float, *, done: int, of: int) -> str:
    """Return an estimate of the time for all runs, once some are done and if it is a minute or more.

    Examples:
        >>> _time_left(600.0, done=20, of=1296)
        ', about 10 h 38 min left'
        >>> _time_left(600.0, done=0, of=1296), _time_left(60.0, done=2, of=3)
        ('', '')
    """
    minutes = int(seconds * (of - done) / done / 60) if done else 0
    hours = f"{minutes // 60} h " if minutes >= 60 else ""
    return f", about {hours}{minutes % 60} min left" if minutes else ""


def print_submitted(plan: SubmissionPlan, jobs: Sequence[submitit.Job[None]]) -> None:
    """Print the jobs that `submit` has started."""
    for planned, job in zip(plan.runs, jobs, strict=True):
        print(f"job {job.job_id}: {planned.run_dir.path}")
    array = jobs[0].job_id.partition("_")[0]
    print(
        f"{len(jobs)} run(s) of {plan.resources.num_ranks} rank(s), {plan.at_a_time} at a time; "
        f"end them: scancel {array}"
    )


def wait(planned: PlannedRun, job: submitit.Job[None]) -> None:
    """Show the job's state and the log of rank 0 until the job ends. Raises SystemExit(1) if a rank failed."""
    submission = last_submission(planned.run_dir)
    assert submission is not None, "submit has just noted it"
    log = job.task(0).paths.stdout
    state: str | None = ""
    shown = 0
    while state is not None:
        time.sleep(POLL_SECONDS)
        before, state = state, _state_in_queue(submission)
        if state is not None and state != before:
            print(f"job {job.job_id}: {state}", flush=True)
        if log.is_file():
            with log.open(encoding="utf-8", errors="replace") as file:
                file.seek(shown)
                print(file.read(), end="", flush=True)
                shown = file.tell()
    num_outcomes = len(outcomes_of_job(log.parent, job_id=job.job_id, inside=log.parent))
    if found := first_error(planned.run_dir, submission):
        rank, problem = found[0], f"rank {found[0]} of job {job.job_id} failed: {found[1].reason}"
    elif num_outcomes < job.num_tasks and (status := status_of(planned.run_dir, {})).state != "finished":
        rank, problem = 0, f"job {job.job_id} {status.state}: {status.reason}"  # in the log, or known to Slurm
    else:
        return
    print(f"error: {problem}; see {job.task(rank).paths.stdout}", file=sys.stderr)
    raise SystemExit(1)


def wait_for_study(runs: Sequence[PlannedRun]) -> None:
    """Print the state of each run when it changes, until all end. Raises SystemExit(1) if one did not finish."""
    printed: dict[Path, str] = {}
    run_dirs = [planned.run_dir for planned in runs]
    while True:
        time.sleep(POLL_SECONDS)
        try:
            queue = queue_for(run_dirs)
        except UserError as error:  # Slurm does not answer at the moment
            print(error, file=sys.stderr, flush=True)
            continue
        statuses = {run_dir.path: status_of(run_dir, queue) for run_dir in run_dirs}
        for path, status in statuses.items():
            if printed.get(path) != status.state:
                printed[path] = status.state
                _print_status(path, status)
        if not {"waiting", "running"} & set(printed.values()):
            break
    if set(printed.values()) != {"finished"}:
        raise SystemExit(1)


def _print_status(run_dir: Path, status: RunStatus) -> None:
    print(f"{run_dir.name}: {status.state} {status.reason}".rstrip(), flush=True)
    if status.problem:
        print(_problem_line(run_dir.name, status), flush=True)


def _problem_line(name: str, status: RunStatus) -> str:
    return f"{printable(name)}: {printable(status.problem)[:MAX_REASON]}"


def _state_in_queue(submission: Submission) -> str | None:
    """Return the state of a job in the queue; None once it has ended."""
    if submission.executor == "local":
        return in_queue(submission, None)
    try:
        return in_queue(submission, queued_jobs([submission.job_id]))
    except UserError as error:  # Slurm does not answer at the moment
        return str(error)


def runs_in(directory: Path) -> list[RunDir]:
    """Return the run at `directory`, or the runs in it by name. Raises `UserError` if there is none."""
    found = [RunDir(path) for path in runs_of([directory]) if RunDir(path).config.is_file()]
    if not found:
        raise UserError(f"{directory} holds no run; pass a --run-dir or --study-dir of launch/slurm.py")
    return found


def table(statuses: Mapping[str, RunStatus]) -> str:
    """Return a table with a line for each run, and below it a line for each whose newest checkpoint is not whole.

    A step is shown as "done/all", or "done/?" if all is not known.
    """
    rows = [HEADER]
    for name, status in statuses.items():
        step = "" if status.step is None else f"{status.step}/{'?' if status.num_steps is None else status.num_steps}"
        loss = "" if status.loss is None else f"{status.loss:.4f}"
        rows.append((printable(name), status.state, step, loss, printable(status.reason)[:MAX_REASON]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines + [_problem_line(name, status) for name, status in statuses.items() if status.problem])


def status_of(run_dir: RunDir, queue: Mapping[str, str] | None) -> RunStatus:
    """Return the status of a run; its state is `unknown` if one of its files is damaged or cannot be read."""
    try:
        return run_status(run_dir, queue)
    except UserError as error:
        reason = str(error)
    except OSError as error:  # such as a file of a colleague, or a lock that the file system does not answer for
        reason = f"{error.filename or run_dir.path} cannot be read ({error.strerror})"
    return RunStatus("unknown", step=None, num_steps=None, loss=None, reason=reason)


def resubmit(runs: Sequence[RunDir], *, command: str, accepted_data: Collection[str] = ()) -> None:
    """Submit runs again with the resources of their last job. Each goes on from its newest checkpoint.

    Runs of one study are submitted together. They use the present code, not the earlier snapshot, because most
    failures are mended in the code. Raises `UserError` if a run has a job that waits or runs, and SystemExit(1) at the
    end if a run on this machine did not finish.
    """
    configs = {run_dir: read_run_config(run_dir) for run_dir in runs}
    queue = queue_for(runs)
    for run_dir in runs:
        refuse_if_active(run_dir, queue)
    groups: dict[str, list[tuple[RunDir, Submission]]] = {}
    for run_dir in runs:
        before = last_submission(run_dir)
        assert before is not None, "only runs that were submitted are submitted again"
        key = f"{before.home_of(run_dir)} {before.model_dump_json(include={'resources', 'executor'})}"
        groups.setdefault(key, []).append((run_dir, before))
    plans = []
    for group in groups.values():
        first_dir, first = group[0]
        home = first.home_of(first_dir)
        plan = SubmissionPlan(
            runs=[PlannedRun(run_dir, configs[run_dir]) for run_dir, _ in group],
            home=home,
            resources=first.resources,
            # A run that was last submitted alone has at_a_time 1.
            at_a_time=min(max(before.at_a_time for _, before in group), len(group)),
            name=home.name,
            executor=first.executor,
            accepted_data=tuple(accepted_data),
        )
        plans.append(plan)
    have_all_finished = True
    for plan in plans:
        if plan.executor == "slurm":
            print_submitted(plan, submit(plan, command=command))
            continue
        try:
            run_study_here(plan, command=command)
        except SystemExit:  # it has printed why
            have_all_finished = False
    if not have_all_finished:
        raise SystemExit(1)
