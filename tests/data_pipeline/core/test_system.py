"""An empty environment variable counts as unset; a user without an account has a name; a quota limits the cores."""

from __future__ import annotations

import getpass
import os
import pwd
from pathlib import Path

import pytest

from data_pipeline.core.errors import run_command
from data_pipeline.core.system import num_cores, unset_empty_variables, variable


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATURE_DROPOUT_TEST_EMPTY", "")
    monkeypatch.setenv("FEATURE_DROPOUT_TEST_ZERO", "0")
    assert variable("FEATURE_DROPOUT_TEST_EMPTY") is None
    assert variable("FEATURE_DROPOUT_TEST_ZERO") == "0"
    assert variable("FEATURE_DROPOUT_TEST_ABSENT") is None


def test_only_the_empty_variables_of_a_prefix_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATURE_DROPOUT_TEST_EMPTY", "")
    monkeypatch.setenv("FEATURE_DROPOUT_TEST_FULL", "x")
    monkeypatch.setenv("OTHER_FEATURE_DROPOUT_TEST", "")
    unset_empty_variables("FEATURE_DROPOUT_TEST_")
    assert "FEATURE_DROPOUT_TEST_EMPTY" not in os.environ
    assert os.environ["FEATURE_DROPOUT_TEST_FULL"] == "x"
    assert os.environ["OTHER_FEATURE_DROPOUT_TEST"] == ""


@pytest.fixture
def without_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave this process without a name and a home directory, as in a container under a user id of its own."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, "")  # so that it is put back, also if the test sets it
        monkeypatch.delenv(name)

    def unknown(user: object) -> None:
        raise KeyError(f"uid not found: {user}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("without_account")
def test_a_command_under_a_user_id_without_an_account_has_a_name() -> None:
    """The import of torchvision asks for the user's name."""
    names = []
    run_command(lambda: names.append(getpass.getuser()))
    assert names == [f"uid-{os.getuid()}"]


def test_a_container_has_the_cores_of_its_quota(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    quotas = {None: cores, "max 100000": cores, "50000 100000": 1, f"{cores * 100_000 - 1} 100000": cores}
    for quota, expected in {**quotas, "99900000 100000": cores}.items():
        if quota is not None:
            (tmp_path / "cpu.max").write_text(f"{quota}\n")
        assert num_cores(tmp_path) == expected
