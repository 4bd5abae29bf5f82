"""The work of `python launch/slurm.py`: from its arguments to submitted jobs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from configs import resolve_recipe, resolve_study
from configs.sweep import resolve_sweep
from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import as_typed, value_at
from data_pipeline.core.system import num_cores
from launch.follow import wait
from launch.here import gpus_here, run_here
from launch.planned_run import PlannedRun, default_run_dir
from launch.resources import RequestedResources, describe_request, parse_fields, resolve_request, resources_for
from launch.slurm_client import has_slurm
from launch.snapshot import read_snapshot
from launch.states import LEFT_ALONE, in_columns, status_of
from launch.submission import SubmissionPlan, check, submit
from launch.submitted import queue_for
from trainer.config_changes import refuse_other_config
from trainer.preflight import check_data
from trainer.provenance import command_line
from trainer.run_dir import RunDir

# A process of another machine counts as running until its last sign of life is some seconds old.
_IF_DEAD: Final = "; if it died just now, repeat the command in 10 s"


def run(arguments: argparse.Namespace) -> None:
    """Submit the runs that the arguments name, or print the batch script in a dry run. Raises `UserError`."""
    plan = plan_from(arguments)
    runs, is_local = plan.runs, arguments.executor == "local"
    queue = queue_for([planned.run_dir for planned in runs])
    states = {planned.name: status_of(planned.run_dir, queue).state for planned in runs}
    left = [planned for planned in runs if states[planned.name] not in LEFT_ALONE]
    plan = replace(plan, runs=left, at_a_time=max(1, min(plan.at_a_time, len(left))))
    notes = [
        f"{name} is {state} already{_IF_DEAD if state == 'running' else ''}"
        for name, state in states.items()
        if state in LEFT_ALONE
    ]
    if left:
        notes.append(f"asks for {describe_request(plan.resources, num_runs=len(left))}")
    if arguments.dry_run:
        _print_dry_run(plan, [*_table_of_runs(runs, states), *notes], has_script=bool(left) and not is_local)
        return
    print(*notes, sep="\n", flush=True)
    log = None
    if left and is_local:
        run_here(plan, command=command_line())
    elif left:
        job_ids = submit(plan, command=command_line())
        for planned, job_id in zip(left, job_ids, strict=True):
            print(f"job {job_id}: {planned.run_dir.path}")
        print(f"end with: scancel {' '.join(dict.fromkeys(job_id.partition('_')[0] for job_id in job_ids))}")
        if len(runs) == 1:
            log = plan.logs / f"{job_ids[0]}_0_log.out"
            print(f"follow: tail -F {log}")
    print(f"state: python launch/status.py {plan.home}", flush=True)
    if arguments.wait:
        wait(runs, log=log)


def plan_from(arguments: argparse.Namespace) -> SubmissionPlan:
    """Return the plan of a submission.

    Raises `UserError` if a flag or a file of the cluster's settings has a wrong value, if flags contradict each other,
    if a run could never start, or if one was begun with other settings.
    """
    runs, name, home = _runs_from(arguments)
    for planned in runs:
        if planned.run_dir.config.is_file():
            refuse_other_config(planned.run_dir, planned.config)
    is_local = arguments.executor == "local"
    at_a_time = min(arguments.at_a_time or (1 if is_local else len(runs)), len(runs))
    flags = {name: value for name, value in vars(arguments).items() if name in RequestedResources.model_fields}
    wanted = resolve_request(flags | {"sbatch": parse_fields(arguments.sbatch or [])})
    if is_local and not wanted.cpus_per_task:  # the ranks share the cores equally
        num_ranks = at_a_time * (wanted.tasks_per_node or wanted.gpus_per_node or 1)
        wanted = wanted.model_copy(update={"cpus_per_task": max(1, num_cores() // num_ranks)})
    resources = resources_for(wanted, [planned.config for planned in runs], nodes=arguments.nodes)
    if is_local and resources.nodes > 1:
        raise UserError(
            f"--executor local has one node, this machine, but --nodes is {resources.nodes}; "
            f"use --tasks-per-node {resources.num_ranks} for as many ranks here"
        )
    return SubmissionPlan(
        runs=runs,
        home=home,
        resources=resources,
        at_a_time=at_a_time,
        name=name,
        accepted_data=(*arguments.accept_data, *arguments.accept_code),
    )


def _runs_from(arguments: argparse.Namespace) -> tuple[list[PlannedRun], str, Path]:
    """Return the runs of a command line, the name of the job, and the directory of logs and code."""
    run_dir, study_dir = arguments.run_dir, arguments.study_dir
    if arguments.only is not None and arguments.study is None:
        raise UserError("--only chooses runs of a study; leave it out, or give --study")
    if arguments.study is None and not arguments.sweep:
        if study_dir is not None or arguments.at_a_time is not None:
            raise UserError("--study-dir and --at-a-time belong to --study and --sweep; use --run-dir for one run")
        config = resolve_recipe(arguments.config, arguments.set)
        home = (run_dir or default_run_dir(config)).absolute()
        return [PlannedRun(RunDir(home), config)], config.name, home
    if arguments.study is None:
        name, configs = resolve_sweep(arguments.config, arguments.sweep, overrides=arguments.set)
    elif arguments.sweep:
        raise UserError("--sweep belongs to --config; a study is a list of runs already")
    else:
        name, configs = arguments.study.partition(":")[2], resolve_study(arguments.study, arguments.set)
    if run_dir is not None:
        raise UserError("a study or a sweep has a directory for each run; pass --study-dir in place of --run-dir")
    home = (study_dir or Path("runs") / name).absolute()
    runs = [PlannedRun(RunDir(home / default_run_dir(config).name), config) for config in configs]
    chosen = [planned for planned in runs if fnmatchcase(planned.name, arguments.only or "*")]
    if not chosen:
        raise UserError(
            f'no run of the study fits --only "{arguments.only}"; its runs have names such as {runs[0].name}'
        )
    return chosen, name, home


def _table_of_runs(runs: Sequence[PlannedRun], states: Mapping[str, str]) -> list[str]:
    """Return a line for each run: its directory, its state, and the settings that its sweep varies."""
    axes = list(dict.fromkeys(axis for planned in runs for axis in planned.config.tracking.axes))
    rows = [
        [planned.name, states[planned.name], *(as_typed(value_at(planned.config, axis)) for axis in axes)]
        for planned in runs
    ]
    return in_columns([["run", "state", *axes], *rows])


def _print_dry_run(plan: SubmissionPlan, notes: Sequence[str], *, has_script: bool) -> None:
    """Print the notes, as comments of the batch script if there is one. Writes nothing. Raises like a submission."""
    if not has_script:
        gpus_here(plan.resources.wanted.gpus_per_node or 0, at_a_time=plan.at_a_time)
        for planned in plan.runs:
            check_data(planned.config)
        print(*notes, sep="\n")
        return
    is_checked = has_slurm()
    more = [] if is_checked else ["not checked by Slurm: there is no sbatch on this machine"]
    script = check(plan, snapshot=read_snapshot(own_files=plan.own_files), asks_slurm=is_checked)
    shebang, _, rest = script.partition("\n")
    print("\n".join([shebang, "", *(f"# {line}" for line in [*notes, *more]), rest]))
