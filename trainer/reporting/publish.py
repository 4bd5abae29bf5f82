"""The report as a run of Weights & Biases, for those who are logged in; the local file never depends on it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import wandb

from data_pipeline.errors import UserError


def publish(page: Path, *, project: str) -> None:
    """Log the page as a run of job type "report", whose id is the page's hash: the same page is the same run.

    With WANDB_MODE=offline it is kept in the `wandb` folder beside the page, for `wandb sync`. Raises `UserError` where
    nobody is logged in or the server does not take it.
    """
    if os.environ.get("WANDB_MODE") != "offline" and not wandb.login(prompt=False):
        raise UserError(
            "--wandb needs a login: run `wandb login` or set WANDB_API_KEY, then repeat the command "
            f"(the report itself is written: {page})"
        )
    digest = hashlib.sha256(page.read_bytes()).hexdigest()[:16]
    try:
        with wandb.init(
            project=project,
            id=f"report-{digest}",
            name=page.name,
            job_type="report",
            dir=page.parent,
            resume="allow",
            settings=wandb.Settings(silent=True, init_timeout=30),
        ) as run:
            run.log({"report": wandb.Html(page.read_text(), inject=False)}, step=0)
    except wandb.errors.Error as error:
        raise UserError(
            f"Weights & Biases did not take the report ({error}); the report itself is written: {page}"
        ) from None
