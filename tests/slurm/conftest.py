"""One private four-node Slurm for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, missing_programs, private_slurm, why_not


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """In CI its packages may not be missing."""
    if reason := why_not():
        if os.environ.get("CI") == "true" and missing_programs():
            pytest.fail(reason)
        pytest.skip(reason)
    with private_slurm() as cluster:
        cluster.environ.pop("OMP_NUM_THREADS", None)
        yield cluster


@pytest.fixture(scope="session")
def slurm(cluster: Cluster) -> dict[str, str]:
    """The environment for commands that shall talk to the private cluster."""
    return cluster.environ
