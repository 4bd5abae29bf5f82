"""A private Slurm of four nodes for all tests of this directory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, missing_programs, private_slurm, why_not


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Start the cluster. In CI a missing package is an error."""
    if reason := why_not():
        if os.environ.get("CI") == "true" and missing_programs():
            pytest.fail(reason)
        pytest.skip(reason)
    with private_slurm() as cluster:
        cluster.environ.pop("OMP_NUM_THREADS", None)
        yield cluster


@pytest.fixture(scope="session")
def slurm(cluster: Cluster) -> dict[str, str]:
    """Return the environment for commands that use the private cluster."""
    return cluster.environ
