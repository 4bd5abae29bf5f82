"""Let a run that waits for a fault pause in each step, so that it does not end before and leaves the cores to others.

Pass the words SLOW_STEPS, and `pausing(SECONDS)` as variables of the environment. Numbers and draws stay the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SLOW_STEPS = ("--code", "slow_views", "--set", "views.kind=slow")
_MODULES = Path(__file__).parent / "own_modules"


def pausing(seconds: float, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` with those that the slow steps need."""
    path = os.pathsep.join([str(_MODULES), *filter(None, [environ.get("PYTHONPATH")])])
    return {**environ, "PYTHONPATH": path, "PAUSE_SECONDS": str(seconds)}
