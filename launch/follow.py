"""Show how runs go on, until they end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.core.errors import UserError
from launch.planned_run import PlannedRun
from launch.states import RunStatus, status_of
from launch.submitted import queue_for

POLL_SECONDS = 1.0


def wait(runs: Sequence[PlannedRun], *, log: Path | None = None) -> None:
    """Print the state of each run when it changes, and what is added to `log`, until all have ended.

    Raises SystemExit(1) if a run did not finish.
    """
    statuses: dict[str, RunStatus] = {}
    num_shown, goes_on = 0, True
    while goes_on:
        time.sleep(POLL_SECONDS)
        goes_on = False
        try:
            queue = queue_for([planned.run_dir for planned in runs])
        except UserError as error:  # Slurm does not answer at the moment
            print(error, file=sys.stderr, flush=True)
            goes_on = True
            continue
        for planned in runs:
            before, now = statuses.get(planned.name), status_of(planned.run_dir, queue)
            goes_on = goes_on or now.state in {"waiting", "running"}
            statuses[planned.name] = now
            if before is None or before.state != now.state:
                print(f"{planned.name}: {now.state} {now.reason}".rstrip(), flush=True)
        if log is not None and log.is_file():
            with log.open(encoding="utf-8", errors="replace") as file:
                file.seek(num_shown)
                print(file.read(), end="", flush=True)
                num_shown = file.tell()
    failed = {name: status for name, status in statuses.items() if status.state != "finished"}
    for name, status in failed.items():
        print(f"error: {name} {status.state}: {status.reason}", file=sys.stderr)
    if failed:
        raise SystemExit(1)
