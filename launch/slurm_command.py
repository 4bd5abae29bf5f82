"""The work of `python launch/slurm.py`: from its arguments to submitted jobs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from configs import resolve_recipe, resolve_study
from data_pipeline.core.errors import UserError
from data_pipeline.core.system import num_cores
from launch.planned_run import PlannedRun, default_run_dir, refuse_other_configs, table_of_runs
from launch.resources import (
    RequestedResources,
    ResolvedRequest,
    describe_origins,
    describe_request,
    parse_fields,
    resolve_request,
    resources_for,
)
from launch.runs import print_submitted, run_study_here, still_to_do, wait, wait_for_study
from launch.slurm_client import has_slurm
from launch.snapshot import read_snapshot
from launch.submission import WARNING_SECONDS, SubmissionPlan, all_gpus_of, dry_run, refuse_for_logs, submit
from launch.submitted import queue_for, refuse_if_active
from launch.sweeps import check_runs, planned_sweep, refuse_replaced_data
from trainer.provenance import command_line


def run(arguments: argparse.Namespace) -> None:
    """Submit the runs that the arguments name, or print the batch script in a dry run. Raises `UserError`."""
    request = request_from(arguments)
    plan = plan_from(arguments, request)
    runs = plan.runs
    notes: list[str] = []
    is_one = arguments.study is None and not arguments.sweep and arguments.sweep_file is None
    if arguments.dry_run and plan.executor == "local":
        all_gpus_of(plan)
        print(check_runs(runs, accepted_data=plan.accepted_data))
        return
    if is_one:
        (planned,) = runs
        refuse_if_active(planned.run_dir, queue_for([planned.run_dir]))
        if planned.is_finished:
            planned.refuse_other_config()
            print(f"{planned.run_dir.path} is finished already; nothing was submitted")
            return
    else:
        left, notes = still_to_do(plan)
        plan = replace(plan, runs=left, at_a_time=max(1, min(plan.at_a_time, len(left))))
    if plan.runs:
        notes.append(f"asks for {describe_request(plan.resources, num_runs=len(plan.runs))}")
    if plan.executor == "local" and plan.resources.says_nothing_of_gpus and (num_gpus := torch.cuda.device_count()):
        notes.append(f"the {num_gpus} GPU(s) of this machine stay idle; --gpus-per-node 0 says that this is meant")
    if plan.executor == "local" and plan.runs and (gpus := all_gpus_of(plan)):
        notes.append(
            f"trains on GPU {', '.join(gpus)} of this machine, and does not look whether other programs use them; give "
            "another submission at the same time a CUDA_VISIBLE_DEVICES of its own"
        )
    if arguments.dry_run:
        _print_dry_run(plan, notes if is_one else [*table_of_runs(runs).splitlines(), *notes], request)
        return
    print(*notes, sep="\n", end="\n" if notes else "", flush=True)
    if is_one:
        _submit_one(plan, then_wait=arguments.wait)
        return
    if plan.runs and plan.executor == "local":
        run_study_here(plan, command=command_line())
    elif plan.runs:
        print_submitted(plan, submit(plan, command=command_line()))
    print(f"state: python launch/status.py {plan.home}", flush=True)
    if arguments.wait:
        wait_for_study(runs)


def request_from(arguments: argparse.Namespace) -> ResolvedRequest:
    """Return the request of the flags, the environment and the files. Raises `UserError` for a wrong value."""
    flags = {name: getattr(arguments, name) for name in RequestedResources.model_fields if name != "sbatch"}
    return resolve_request(flags | {"sbatch": parse_fields(arguments.sbatch) if arguments.sbatch else None})


def plan_from(arguments: argparse.Namespace, request: ResolvedRequest) -> SubmissionPlan:
    """Return the plan of a submission.

    Raises `UserError` if flags contradict each other, if a run could never start, or if finished runs of a study or a
    sweep have other settings or other data.
    """
    if arguments.only is not None and arguments.study is None:
        raise UserError("--only chooses runs of a study; leave it out, or give --study")
    sweep = planned_sweep(arguments)
    if sweep is not None:
        runs, name, home = list(sweep.runs), sweep.sweep.name, sweep.home
        refuse_replaced_data(home, runs, accepted_data=arguments.accept_data)
    elif arguments.study is None:
        if arguments.study_dir is not None or arguments.at_a_time is not None:
            raise UserError("--study-dir and --at-a-time belong to --study and --sweep; use --run-dir for one run")
        config = resolve_recipe(arguments.config, arguments.set)
        home = (arguments.run_dir or default_run_dir(config)).absolute()
        runs, name = [PlannedRun.at(home, config)], config.name
    else:
        configs = resolve_study(arguments.study, arguments.set)
        if arguments.run_dir is not None:
            raise UserError("a study has a directory for each run; pass --study-dir in place of --run-dir")
        name = arguments.study.partition(":")[2]
        home = (arguments.study_dir or Path("runs") / name).absolute()
        runs = [PlannedRun.within(home, config) for config in configs]
        runs = chosen_runs(runs, arguments.only)
        refuse_other_configs(runs)
        refuse_replaced_data(home, runs, accepted_data=arguments.accept_data)
    refuse_for_logs(home)
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
        accepted_data=(*arguments.accept_data, *arguments.accept_code),
    )


def chosen_runs(runs: list[PlannedRun], pattern: str | None) -> list[PlannedRun]:
    """Return the runs whose directory's name fits a pattern of a shell; all if it is None.

    Raises `UserError` if none fits.
    """
    if pattern is None:
        return runs
    names = [planned.run_dir.path.name for planned in runs]
    fitting = [planned for planned, name in zip(runs, names, strict=True) if fnmatchcase(name, pattern)]
    if not fitting:
        raise UserError(f'no run of the study fits --only "{pattern}"; its runs have names such as {names[0]}')
    return fitting


def _with_part_of_cores(wanted: RequestedResources, *, at_a_time: int) -> RequestedResources:
    """Give each rank on this machine an equal share of the cores, unless another number is asked for."""
    num_ranks = at_a_time * (wanted.tasks_per_node or wanted.gpus_per_node or 1)
    part = max(1, num_cores() // num_ranks)
    return wanted if wanted.cpus_per_task else wanted.model_copy(update={"cpus_per_task": part})


def _print_dry_run(plan: SubmissionPlan, notes: Sequence[str], request: ResolvedRequest) -> None:
    """Print the batch script, or only the notes if no run is left to submit. Raises the errors of `submit`."""
    if not plan.runs:
        print(*notes, sep="\n")
        return
    script = dry_run(plan, snapshot=read_snapshot(own_files=plan.own_files))
    unchecked = [] if has_slurm() else ["not checked by Slurm: there is no sbatch on this machine"]
    shebang, _, rest = script.partition("\n")
    print("\n".join([shebang, "", *(f"# {line}" for line in [*notes, *unchecked, *describe_origins(request)]), rest]))


def _submit_one(plan: SubmissionPlan, *, then_wait: bool) -> None:
    (planned,) = plan.runs
    (job,) = submit(plan, command=command_line())
    where = "this machine" if plan.executor == "local" else f"{plan.resources.nodes} node(s)"
    print(f"job {job.job_id}: {plan.resources.num_ranks} rank(s) on {where}")
    print(f"run directory: {planned.run_dir.path}")
    print(f"follow: tail -F {job.task(0).paths.stdout}  (one log a rank: {job.job_id}_RANK_log.out)", flush=True)
    if plan.executor == "slurm":
        print(f"state: squeue --jobs {job.job_id}; end it: scancel {job.job_id}", flush=True)
    if then_wait:
        wait(planned, job)
