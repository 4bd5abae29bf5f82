"""Where the runs of a study stand, or one run; and submit those that failed again.

python launch/status.py runs/table1
python launch/status.py runs/table1 --resubmit-failed
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from data_pipeline.core.errors import UserError, printable, run_command
from launch.slurm import Member, Plan, run_study_here, submit, tell_study
from launch.submitted import RunStatus, Submission, last_submission, queue_for, run_status
from trainer.config import read_config, refuse_commands
from trainer.provenance import command_line
from trainer.run_dir import RunDir

HEADER = ("run", "state", "step", "loss", "reason")
MAX_REASON = 500  # characters that are shown


def runs_in(directory: Path) -> list[RunDir]:
    """The run at `directory`, or the runs in it, by name; raises `UserError` if there is none."""
    found = [RunDir(path) for path in (directory, *sorted(directory.glob("*/"))) if RunDir(path).config.is_file()]
    if not found:
        raise UserError(f"{directory} holds no run; pass a --run-dir or --study-dir of launch/slurm.py")
    return found[:1] if found[0].path == directory else found


def table(statuses: Mapping[str, RunStatus]) -> str:
    """A line for each run; a step is "logged/all" where the number of all is known."""
    rows = [HEADER]
    for name, status in statuses.items():
        step = "" if status.step is None else f"{status.step}/{'?' if status.num_steps is None else status.num_steps}"
        loss = "" if status.loss is None else f"{status.loss:.4f}"
        rows.append((printable(name), status.state, step, loss, printable(status.reason)[:MAX_REASON]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def status_of(run_dir: RunDir, queue: Mapping[str, str] | None) -> RunStatus:
    """Return where a run stands; a run with a damaged file is `unknown`, and hides no other."""
    try:
        return run_status(run_dir, queue)
    except UserError as error:
        return RunStatus("unknown", step=None, num_steps=None, loss=None, reason=str(error))


def resubmit(runs: Sequence[RunDir], *, command: str, allow_pipe: bool = False) -> None:
    """Each with what its job asked for, together where they were; a run goes on from its newest checkpoint.

    The code is that of now, not the snapshot of before: most failures are mended there. Raises SystemExit(1), once all
    have been started, where one that runs on this machine did not finish.
    """
    configs = {run_dir: read_config(run_dir.config, allow_pipe=allow_pipe) for run_dir in runs}
    for config in configs.values():
        refuse_commands(config)
    groups: dict[str, list[tuple[RunDir, Submission]]] = {}
    for run_dir in runs:
        before = last_submission(run_dir)
        assert before is not None, "only runs that were submitted are submitted again"
        key = f"{before.home_of(run_dir)} {before.model_dump_json(include={'resources', 'executor'})}"
        groups.setdefault(key, []).append((run_dir, before))
    plans = [
        Plan(
            members=[Member(run_dir, configs[run_dir]) for run_dir, _ in group],
            home=group[0][1].home_of(group[0][0]),
            resources=group[0][1].resources,
            # One that was submitted alone meanwhile had no others to run beside.
            at_a_time=min(max(before.at_a_time for _, before in group), len(group)),
            name=group[0][1].home_of(group[0][0]).name,
            executor=group[0][1].executor,
        )
        for group in groups.values()
    ]
    have_all_finished = True
    for plan in plans:
        if plan.executor == "slurm":
            tell_study(plan, submit(plan, command=command))
            continue
        try:
            run_study_here(plan, command=command)
        except SystemExit:  # which it has explained
            have_all_finished = False
    if not have_all_finished:
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="a study's directory, or a run's")
    parser.add_argument("--resubmit-failed", action="store_true", help="submit those that failed again, and no others")
    parser.add_argument("--allow-pipe", action="store_true", help="resubmit runs with pipe: locations too")
    arguments = parser.parse_args()
    runs = runs_in(arguments.directory.absolute())
    queue = queue_for(runs)
    statuses = {run_dir: status_of(run_dir, queue) for run_dir in runs}
    print(table({run_dir.path.name: status for run_dir, status in statuses.items()}))
    if arguments.resubmit_failed:
        failed = [run_dir for run_dir, status in statuses.items() if status.state == "failed"]
        submitted = [run_dir for run_dir in failed if last_submission(run_dir) is not None]
        for run_dir in failed:
            if run_dir not in submitted:
                print(f"{printable(run_dir.path.name)} was never submitted; start it again with its own command")
        if submitted:
            resubmit(submitted, command=command_line(), allow_pipe=arguments.allow_pipe)
        elif not failed:
            print("nothing has failed")


if __name__ == "__main__":
    run_command(main)
