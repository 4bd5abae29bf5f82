"""The work of `python launch/slurm.py`: from its arguments to submitted jobs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from configs import resolve_recipe, resolve_study
from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import as_typed, value_at
from data_pipeline.core.system import num_cores
from launch.follow import wait
from launch.here import run_study_here
from launch.planned_run import PlannedRun, default_run_dir, refuse_other_configs
from launch.resources import (
    RequestedResources,
    ResolvedRequest,
    describe_origins,
    describe_request,
    parse_fields,
    resolve_request,
    resources_for,
)
from launch.slurm_client import has_slurm
from launch.snapshot import read_snapshot
from launch.states import LEFT_ALONE, in_columns, status_of
from launch.submission import WARNING_SECONDS, SubmissionPlan, check, gpus_here, start_here, submit
from launch.submitted import queue_for
from launch.sweeps import planned_sweep, refuse_replaced_data
from trainer.preflight import check_data
from trainer.provenance import command_line


def run(arguments: argparse.Namespace) -> None:
    """Submit the runs that the arguments name, or print the batch script in a dry run. Raises `UserError`."""
    request = request_from(arguments)
    plan = plan_from(arguments, request)
    runs = plan.runs
    queue = queue_for([planned.run_dir for planned in runs])
    states = [status_of(planned.run_dir, queue).state for planned in runs]
    left = [planned for planned, state in zip(runs, states, strict=True) if state not in LEFT_ALONE]
    plan = replace(plan, runs=left, at_a_time=max(1, min(plan.at_a_time, len(left))))
    notes = [
        f"{planned.name} is {state} already" for planned, state in zip(runs, states, strict=True) if planned not in left
    ]
    if left:
        notes.append(f"asks for {describe_request(plan.resources, num_runs=len(left))}")
    if arguments.dry_run:
        _print_dry_run(plan, [*_table_of_runs(runs, states), *notes], request)
        return
    print(*notes, sep="\n", flush=True)
    log, process = None, None
    if left and plan.executor == "local" and plan.home == left[0].run_dir.path:
        process = start_here(plan, command=command_line())
        log = process.task(0).paths.stdout
    elif left and plan.executor == "local":
        run_study_here(plan, command=command_line())
    elif left:
        job_ids = submit(plan, command=command_line())
        for planned, job_id in zip(left, job_ids, strict=True):
            print(f"job {job_id}: {planned.run_dir.path}")
        print(f"end with: scancel {job_ids[0].partition('_')[0]}")
        log = plan.logs / f"{job_ids[0]}_0_log.out" if len(runs) == 1 else None
    if log is not None:
        print(f"follow: tail -F {log}")
    print(f"state: python launch/status.py {plan.home}", flush=True)
    if arguments.wait:
        wait(runs, log=log, process=process)


def request_from(arguments: argparse.Namespace) -> ResolvedRequest:
    """Return the request of the flags and the files. Raises `UserError` for a wrong value."""
    flags = {name: getattr(arguments, name) for name in RequestedResources.model_fields if name != "sbatch"}
    return resolve_request(flags | {"sbatch": parse_fields(arguments.sbatch) if arguments.sbatch else None})


def plan_from(arguments: argparse.Namespace, request: ResolvedRequest) -> SubmissionPlan:
    """Return the plan of a submission.

    Raises `UserError` if flags contradict each other, if a run could never start, or if runs of a study or a sweep were
    begun with other settings or other data.
    """
    runs, name, home = _runs_from(arguments)
    accepted = (*arguments.accept_data, *arguments.accept_code)
    refuse_other_configs(runs)
    if home != runs[0].run_dir.path:  # the start of a single run compares them itself
        refuse_replaced_data(home, runs, accepted_data=accepted)
    is_local = arguments.executor == "local"
    at_a_time = min(arguments.at_a_time or (1 if is_local else len(runs)), len(runs))
    wanted = _with_part_of_cores(request.wanted, at_a_time=at_a_time) if is_local else request.wanted
    resources = resources_for(wanted, [planned.config for planned in runs], nodes=arguments.nodes)
    if is_local and resources.nodes > 1:
        raise UserError(
            f"--executor local has one node, this machine, but --nodes is {resources.nodes}; "
            f"use --tasks-per-node {resources.num_ranks} for as many ranks here"
        )
    if resources.time_minutes * 60 <= WARNING_SECONDS:  # each start would be warned in its first step
        raise UserError(
            f"--time-minutes {resources.time_minutes} leaves no time to train, because a run is warned "
            f"{WARNING_SECONDS} seconds before its limit; allow {WARNING_SECONDS // 60 + 1} minutes or more"
        )
    return SubmissionPlan(
        runs=runs,
        home=home,
        resources=resources,
        at_a_time=at_a_time,
        name=name,
        executor=arguments.executor,
        accepted_data=accepted,
    )


def _runs_from(arguments: argparse.Namespace) -> tuple[list[PlannedRun], str, Path]:
    """Return the runs of a command line, the name of the job, and the directory of logs and code."""
    if arguments.only is not None and arguments.study is None:
        raise UserError("--only chooses runs of a study; leave it out, or give --study")
    if arguments.sweep or arguments.sweep_file is not None:
        sweep, home, runs = planned_sweep(arguments)
        return runs, sweep.name, home
    if arguments.study is None:
        if arguments.study_dir is not None or arguments.at_a_time is not None:
            raise UserError("--study-dir and --at-a-time belong to --study and --sweep; use --run-dir for one run")
        config = resolve_recipe(arguments.config, arguments.set)
        home = (arguments.run_dir or default_run_dir(config)).absolute()
        return [PlannedRun.at(home, config)], config.name, home
    configs = resolve_study(arguments.study, arguments.set)
    if arguments.run_dir is not None:
        raise UserError("a study has a directory for each run; pass --study-dir in place of --run-dir")
    name = arguments.study.partition(":")[2]
    home = (arguments.study_dir or Path("runs") / name).absolute()
    runs = [PlannedRun.within(home, config) for config in configs]
    return chosen_runs(runs, arguments.only), name, home


def chosen_runs(runs: list[PlannedRun], pattern: str | None) -> list[PlannedRun]:
    """Return the runs whose directory's name fits a pattern of a shell; all if it is None.

    Raises `UserError` if none fits.
    """
    fitting = [planned for planned in runs if fnmatchcase(planned.name, pattern or "*")]
    if not fitting:
        raise UserError(f'no run of the study fits --only "{pattern}"; its runs have names such as {runs[0].name}')
    return fitting


def _with_part_of_cores(wanted: RequestedResources, *, at_a_time: int) -> RequestedResources:
    """Give each rank on this machine an equal share of the cores, unless another number is asked for."""
    num_ranks = at_a_time * (wanted.tasks_per_node or wanted.gpus_per_node or 1)
    part = max(1, num_cores() // num_ranks)
    return wanted if wanted.cpus_per_task else wanted.model_copy(update={"cpus_per_task": part})


def _table_of_runs(runs: Sequence[PlannedRun], states: Sequence[str]) -> list[str]:
    """Return a line for each run: its directory, its state, and the settings that its sweep varies."""
    axes = list(dict.fromkeys(axis for planned in runs for axis in planned.config.tracking.axes))
    rows = [
        [planned.name, state, *(as_typed(value_at(planned.config, axis)) for axis in axes)]
        for planned, state in zip(runs, states, strict=True)
    ]
    return in_columns([["run", "state", *axes], *rows])


def _print_dry_run(plan: SubmissionPlan, notes: Sequence[str], request: ResolvedRequest) -> None:
    """Print the notes, and for Slurm the batch script below them. Writes nothing. Raises the errors of `submit`."""
    if plan.executor == "local" or not plan.runs:
        gpus_here(plan.resources, at_a_time=plan.at_a_time)
        for planned in plan.runs:
            check_data(planned.config)
        print(*notes, sep="\n")
        return
    is_checked = has_slurm()
    script = check(plan, snapshot=read_snapshot(own_files=plan.own_files), asks_slurm=is_checked)
    unchecked = [] if is_checked else ["not checked by Slurm: there is no sbatch on this machine"]
    shebang, _, rest = script.partition("\n")
    print("\n".join([shebang, "", *(f"# {line}" for line in [*notes, *unchecked, *describe_origins(request)]), rest]))
