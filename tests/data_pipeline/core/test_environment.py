"""An empty environment variable counts as unset."""

from __future__ import annotations

import os

import pytest

from data_pipeline.core.environment import set_variables, unset_empty_variables, variable


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATURE_DROPOUT_TEST_EMPTY", "")
    monkeypatch.setenv("FEATURE_DROPOUT_TEST_ZERO", "0")
    assert variable("FEATURE_DROPOUT_TEST_EMPTY") is None
    assert variable("FEATURE_DROPOUT_TEST_ZERO") == "0"
    assert variable("FEATURE_DROPOUT_TEST_ABSENT") is None
    assert set_variables({"RANK": "", "WORLD_SIZE": "0"}) == {"WORLD_SIZE": "0"}


def test_only_the_empty_variables_of_a_prefix_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATURE_DROPOUT_TEST_EMPTY", "")
    monkeypatch.setenv("FEATURE_DROPOUT_TEST_FULL", "x")
    monkeypatch.setenv("OTHER_FEATURE_DROPOUT_TEST", "")
    unset_empty_variables("FEATURE_DROPOUT_TEST_")
    assert "FEATURE_DROPOUT_TEST_EMPTY" not in os.environ
    assert os.environ["FEATURE_DROPOUT_TEST_FULL"] == "x"
    assert os.environ["OTHER_FEATURE_DROPOUT_TEST"] == ""
