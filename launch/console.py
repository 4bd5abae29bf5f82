"""The commands that an installation puts on the PATH; each does the same as `python -m` of its module.

`pip install` makes a script for each name in setup.py (`entry_points`), which calls the function here.
"""

from __future__ import annotations

import importlib
from functools import partial

from data_pipeline.core.errors import run_command


def _run(module: str) -> None:
    run_command(lambda: importlib.import_module(module).main())


train = partial(_run, "launch.train")
slurm = partial(_run, "launch.slurm")
status = partial(_run, "launch.status")
data = partial(_run, "data_pipeline.__main__")
probe = partial(_run, "trainer.probe")
analyze = partial(_run, "trainer.analyze")
report = partial(_run, "trainer.report")
export = partial(_run, "trainer.export")
theory = partial(_run, "trainer.theory.__main__")
