"""The environment of a new job: what it must not inherit from the job that this command runs in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from submitit.helpers import clean_env

from data_pipeline.core.environment import variable


@contextlib.contextmanager
def outside_any_job(more: Mapping[str, str] | None = None) -> Iterator[None]:
    """Hide the variables of a Slurm job or of torchrun, which a new job would inherit, and set `more` instead."""
    before = dict(os.environ)
    slurm_conf = variable("SLURM_CONF")
    try:
        with clean_env(extra_names=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")):
            if slurm_conf is not None:  # says which cluster, not which job
                os.environ["SLURM_CONF"] = slurm_conf
            os.environ.update(more or {})
            yield
    finally:
        for name in more or {}:
            os.environ.pop(name, None)
        os.environ.update(before)
