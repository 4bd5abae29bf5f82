"""No Slurm of the machine takes part in these tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the commands of Slurm fail at once. The real cluster may answer late, or know the same job ids."""
    monkeypatch.setenv("SLURM_CONF", "/dev/null")
