"""Plan the runs of a sweep from a command line, and train them one after another in this process."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from configs.sweep import MAX_RUNS, Sweep, SweepSpace, explain_sweep, read_space, resolve_sweep
from data_pipeline.core.errors import UserError, printable, storage_problem
from launch.outcome import last_line
from launch.planned_run import PlannedRun, refuse_other_configs, table_of_runs
from launch.rank import joined_ranks, noting_its_end, train_on
from trainer.checkpoint.restore import newest_state
from trainer.checkpoint.run_state import DataIdentity, identity_in_provenance
from trainer.data import DataConfig, read_manifests
from trainer.distributed.environment import read_env
from trainer.fault_tolerance.preemption import StoppedError
from trainer.preflight import check_data, check_resumed
from trainer.run_dir import RunDir, is_held, runs_of

_STATES: Final = ("finished", "running", "begun", "damaged", "new")  # of `PlannedRun.state`, in the order of the count
_MAX_GROUP: Final = 128  # characters that W&B allows


@dataclass(frozen=True)
class PlannedSweep:
    """A sweep with the directories of its runs, which are in `home`."""

    sweep: Sweep
    space: SweepSpace
    home: Path
    runs: tuple[PlannedRun, ...]


def planned_sweep(arguments: argparse.Namespace) -> PlannedSweep | None:
    """Return the sweep of a command line; None if it has no --sweep and no --sweep-file.

    Asks on a terminal before it makes more runs than `--max-runs`. Raises `UserError` if the sweep is not valid, if it
    has too many runs and nobody can be asked, or if a run of it exists with another config.
    """
    if not arguments.sweep and arguments.sweep_file is None:
        return None
    if arguments.config is None:
        raise UserError("--sweep and --sweep-file belong to --config; a study is a list of runs already")
    if arguments.run_dir is not None:
        raise UserError("a sweep has a directory for each run; pass --study-dir in place of --run-dir")
    space = read_space(arguments.sweep, arguments.sweep_file, overrides=arguments.set)
    _ask_for_many(space.num_runs, most=arguments.max_runs)
    study_dir = arguments.study_dir
    sweep = resolve_sweep(
        arguments.config,
        space,
        overrides=arguments.set,
        group=None if study_dir is None else printable(study_dir.absolute().name)[:_MAX_GROUP],
    )
    home = (study_dir or Path("runs") / sweep.name).absolute()
    runs = tuple(PlannedRun.within(home, config) for config in sweep.runs)
    refuse_other_configs(runs)
    return PlannedSweep(sweep, space, home, runs)


def _ask_for_many(num_runs: int, *, most: int | None) -> None:
    if num_runs <= (most or MAX_RUNS):
        return
    if most is None and _is_terminal():
        if input(f"This sweep has {num_runs:,} runs. Go on? [y/N] ").strip().lower() in {"y", "yes"}:
            return
        raise UserError(f"a sweep of {num_runs:,} runs was not confirmed; nothing was started")
    raise UserError(
        f"the sweep has {num_runs:,} runs, more than {most or MAX_RUNS:,}; give fewer values, or pass --max-runs "
        f"{num_runs} if that is meant"
    )


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def run_sweep(planned: PlannedSweep, arguments: argparse.Namespace, *, command: str) -> None:
    """Train the runs of a sweep as launch/train.py does, or print what the arguments ask for. Raises `UserError`."""
    if arguments.plan:
        raise UserError("--plan is for one run; leave out --sweep and --sweep-file, and give its settings with --set")
    if arguments.explain:
        print(
            explain_sweep(
                arguments.config,
                planned.sweep,
                planned.space,
                overrides=arguments.set,
            )
        )
        return
    accepted = (*arguments.accept_data, *arguments.accept_code)
    if not arguments.dry_run and read_env(os.environ).world_size == 1:  # several ranks would write one index at once
        for data in _data_of(planned.runs).values():
            read_manifests(data, makes_index=True)
    refuse_replaced_data(planned.home, planned.runs, accepted_data=accepted)
    if arguments.dry_run:
        print(check_runs(planned.runs, accepted_data=accepted))
        return
    try:
        train_in_turn(planned.runs, command=command, accepted_data=accepted)
    except StoppedError as stopped:
        if stopped.is_first_rank:
            num_finished = sum(run.is_finished for run in planned.runs)
            print(stopped, file=sys.stderr)
            print(
                f"{num_finished} of {len(planned.runs)} runs are finished; the same command goes on with the others",
                file=sys.stderr,
            )
        raise SystemExit(1) from None
    if read_env(os.environ).rank == 0:
        print(f"compare them: python -m trainer.report {planned.home}")


def check_runs(runs: Sequence[PlannedRun], *, accepted_data: Collection[str]) -> str:
    """Check that the runs can use their data and their directories, and return a table of them. Writes nothing."""
    for planned in runs:
        manifests = check_data(planned.config)
        if planned.run_dir.config.is_file():
            planned.refuse_other_config()
            check_resumed(
                planned.run_dir,
                planned.config,
                manifests,
                newest_state(planned.run_dir),
                accepted_data=accepted_data,
            )
    num = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
    states = Counter("begun" if state.startswith("at step") else state for state in (run.state for run in runs))
    counts = ", ".join(f"{states[state]} {state}" for state in _STATES if states[state])
    home = runs[0].run_dir.path.parent
    return f"{table_of_runs(runs)}\n{num} in {printable(str(home))}" + (f": {counts}" if set(states) != {"new"} else "")


def refuse_replaced_data(home: Path, runs: Sequence[PlannedRun], *, accepted_data: Collection[str]) -> None:
    """Raise `UserError` if a run in `home` was trained on other data than `runs` find at the same place now.

    The results of such a study or sweep could not be compared. `accepted_data` are the names of new data that may be
    used. Data that cannot be read are passed over, because finished runs do not need them.
    """
    planned = _data_of(runs)
    now: dict[tuple[str, ...], DataIdentity | None] = {}
    for run_dir in map(RunDir, runs_of([home])):
        trained_on = identity_in_provenance(run_dir)
        if trained_on is None or not run_dir.config.is_file():
            continue
        where = DataConfig.parse(run_dir.read_config().get("data", {}), where=str(run_dir.config)).locations
        if where not in now:
            now[where] = _identity_now(planned[where]) if where in planned else None
        found = now[where]
        if found is not None and found != trained_on and found.name not in accepted_data:
            raise UserError(
                f"{run_dir.path} was trained on other data than {' and '.join(where)} hold now, so its results could "
                "not be compared with those of new runs; put the old data back, pass another --study-dir, or add "
                f"--accept-data {found.name}"
            )


def _data_of(runs: Sequence[PlannedRun]) -> dict[tuple[str, ...], DataConfig]:
    """Return the data of the runs, once for each place."""
    return {planned.config.data.locations: planned.config.data for planned in runs}


def _identity_now(data: DataConfig) -> DataIdentity | None:
    """Return the identity of datasets; None if they cannot be read, which a run that needs them says itself."""
    try:
        return read_manifests(data, makes_index=False).identity
    except UserError:
        return None


def train_in_turn(runs: Sequence[PlannedRun], *, command: str, accepted_data: Collection[str]) -> None:
    """Train the runs one after another, in this process or as one rank under torchrun, and print each start and end.

    Leaves out the runs that are finished or that another process trains. If a run of a single process fails, the others
    go on, and this raises SystemExit(1) at the end. Raises StoppedError if a signal asks a run to stop, and `UserError`
    before any run starts if a run of a single process cannot use its data or its directory.
    """
    world = read_env(os.environ)
    is_alone, is_first = world.world_size == 1, world.rank == 0
    left = [planned for planned in runs if not planned.is_finished]
    if is_first:
        for planned in runs:
            if planned not in left:
                print(f"{planned.name} is finished already", flush=True)
    if not left:
        return
    if is_alone:
        found = [check_data(planned.config) for planned in left]
        for planned, manifests in zip(left, found, strict=True):
            if not is_held(planned.run_dir):
                planned.claim(manifests, accepted_data=accepted_data)
    num_failed = 0
    with joined_ranks() as device:
        for number, planned in enumerate(left, 1):
            if is_alone and (is_held(planned.run_dir) or planned.is_finished):  # another process shares the work
                print(f"{planned.name} is {planned.state} already", flush=True)
                continue
            if is_first:
                print(f"[{number}/{len(left)}] {planned.name}", flush=True)
            try:
                with noting_its_end(planned.config, planned.run_dir.path):
                    train_on(device, planned.config, planned.run_dir.path, command=command, accepted_data=accepted_data)
            except StoppedError:
                raise
            except Exception as error:
                if not is_alone:  # the other ranks may wait for this one
                    raise
                num_failed += 1
                print(f"{planned.name}: failed: {_reason(error)}", file=sys.stderr, flush=True)
            else:
                if is_first:
                    print(f"{planned.name}: finished", flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if num_failed:
        print(
            f"error: {num_failed} of {len(runs)} run(s) did not finish; repeat the command to go on with them",
            file=sys.stderr,
        )
        raise SystemExit(1)


def _reason(error: Exception) -> str:
    if isinstance(error, UserError):
        return printable(str(error))
    problem = storage_problem(error) if isinstance(error, OSError) else None
    return printable(problem or last_line(error))
