"""The encoder of a finished or running run, for probes, analyses and other people's code."""

from __future__ import annotations

from pathlib import Path

from trainer.models.encoder import Encoder
from trainer.rundir import open_run


def load_encoder(run_dir: str | Path, *, step: int | None = None) -> Encoder:
    """The encoder of a run directory, on the CPU in eval mode; `step` None means the newest checkpoint.

    Raises `UserError` if `run_dir` is not a run directory or holds no such checkpoint.
    """
    from trainer.checkpoint import load_players  # here, because checkpoint -> config -> trainer.models is a cycle

    return load_players(open_run(Path(run_dir)), step=step).encoder
