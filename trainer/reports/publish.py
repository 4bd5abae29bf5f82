"""Publish the report at Weights & Biases, which needs a login. The local file never depends on it.

Two things are made there. A run of job type "report" holds the page. A W&B report has the same table, and the page with
its curves. Publishing the same runs again updates both. Invariant: the same runs never get a second report.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Sequence
from pathlib import Path

import wandb

from data_pipeline.core.errors import UserError
from data_pipeline.core.imports import check_installed
from data_pipeline.core.system import unset_empty_variables, variable
from trainer.reports.comparison import compare
from trainer.reports.page import differences, provenance, templates, title_of
from trainer.reports.runs import Run
from trainer.reports.table import Measurement
from trainer.run_dir import RunDir, read_object, write_json

MAX_TITLE = 128  # characters that W&B allows


def publish(page: Path, runs: Sequence[Run], rows: Sequence[Measurement]) -> str:
    """Publish or update the report, and return its address.

    With WANDB_MODE=offline this makes only the run, in the `wandb` directory beside the page, for `wandb sync`. Raises
    `UserError` without a login, without wandb-workspaces, or if the server refuses the report.
    """
    unset_empty_variables("WANDB_")
    offline = variable("WANDB_MODE") == "offline"
    title = title_of(runs)[:MAX_TITLE]
    if not offline:
        check_installed("wandb_workspaces", extra="reports", user="--wandb")
        if not wandb.login(prompt=False):
            raise UserError("--wandb needs a login: run `wandb login` or set WANDB_API_KEY, then repeat the command")
    try:
        entity, project, run_id = _log_run(page, runs, title=title, offline=offline)
        if offline:
            return (
                f"kept for `wandb sync {page.parent / 'wandb'}/offline-run-*-{run_id}`; offline there is no W&B report"
            )
        return _save_report(page, runs, rows, entity=entity, project=project, run_id=run_id, title=title)
    except (wandb.errors.Error, ValueError, OSError, RuntimeError) as error:
        raise UserError(f"Weights & Biases did not take the report ({' '.join(str(error).split())})") from None


def report_run_id(runs: Sequence[Run]) -> str:
    """Return the id of the report's run: a hash of the ids of the runs at W&B, or of their paths if they have none."""
    names = sorted(_run_id(run) or str(run.path.resolve()) for run in runs)
    return f"report-{hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]}"


def _run_id(run: Run) -> str | None:
    path = RunDir(run.path).wandb_run_id
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else None


def _log_run(page: Path, runs: Sequence[Run], *, title: str, offline: bool) -> tuple[str, str, str]:
    """Log the page as a run. Return its entity, its project and its id."""
    with wandb.init(
        project=runs[0].config.tracking.wandb_project,
        id=report_run_id(runs),
        name=title,
        job_type="report",
        dir=page.parent,
        resume="allow",
        mode="offline" if offline else None,  # W&B itself reads the environment once in a process
        settings=wandb.Settings(
            silent=True,
            init_timeout=30,
            disable_git=True,
            x_disable_stats=True,
            x_save_requirements=False,
            reinit="create_new",  # otherwise `wandb.init` returns or ends an open run, such as that of a notebook
        ),
    ) as run:
        run.log({"report": wandb.Html(page.read_text(encoding="utf-8"), inject=False)})
        return run.entity, run.project, run.id


def _save_report(
    page: Path,
    runs: Sequence[Run],
    rows: Sequence[Measurement],
    *,
    entity: str,
    project: str,
    run_id: str,
    title: str,
) -> str:
    """Save the report at W&B and return its address. Writes its id into PAGE.wandb.json, for the next time."""
    wr = importlib.import_module("wandb_workspaces.reports.v2")
    words = templates().get_template("wandb.md")
    text = words.render(comparisons=compare(rows), tables=[differences(runs), *provenance(runs)])
    this_run = wr.Runset(entity=entity, project=project, name="this report", filters=f"ID in {json.dumps([run_id])}")
    panel = wr.MediaBrowser(title="report", media_keys=["report"], num_columns=1)
    report = wr.Report(
        entity=entity,
        project=project,
        title=title,
        description=f"Runs: {', '.join(run.name for run in runs)}",
        blocks=[
            wr.MarkdownBlock(text=text),
            wr.H2(text="Curves, views and analyses"),
            wr.PanelGrid(runsets=[this_run], panels=[panel]),
        ],
        width="fluid",
    )
    kept = page.with_name(f"{page.name}.wandb.json")
    if kept.is_file():
        published = read_object(kept, mend="remove it, and a new report is made at W&B")
        if (published["entity"], published["project"]) == (entity, project):
            report.id = published["report_id"]
    report.save()
    url: str = report.url
    write_json(kept, {"entity": entity, "project": project, "report_id": report.id, "url": url})
    return url
