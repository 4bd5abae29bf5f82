"""One private four-node Slurm for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import missing_programs, private_slurm, why_not


@pytest.fixture(scope="session")
def slurm() -> Iterator[dict[str, str]]:
    """The environment for commands that shall talk to the private cluster; in CI its packages may not be missing."""
    if reason := why_not():
        if os.environ.get("CI") == "true" and missing_programs():
            pytest.fail(reason)
        pytest.skip(reason)
    with private_slurm() as conf:
        yield {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | {
            "SLURM_CONF": str(conf)
        }
