"""Sessions on a lent machine: what fails, crashes or hangs, and what an earlier session has filed."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_stages.session import (
    Measurement,
    Outcome,
    Setting,
    Stage,
    Task,
    add_measurement,
    begin_session,
    read_record,
    run_stage,
)


def setting_at(directory: Path) -> Setting:
    return Setting(torch.device("cpu"), directory, directory, is_tiny=True, ends_at=time.time() + 600)


def succeed() -> Outcome:
    return Outcome({"answer": 42})


def fail() -> Outcome:
    raise RuntimeError("CUDA error:\n  an illegal memory access")


def crash() -> Outcome:
    os._exit(7)


def hang() -> Outcome:
    time.sleep(600)
    return Outcome({})


def fragile_tasks(_: Setting) -> Mapping[str, Task]:
    found = {"hangs": Task(hang, -11.9)}  # it is ended after half a second
    return found | {"works": Task(succeed, 1), "is long": Task(succeed, 10_000), "crashes": Task(crash, 1)}


def sound_tasks(_: Setting) -> Mapping[str, Task]:
    return {name: Task(succeed, 0) for name in ("a", "b", "c")}


SOUND = Stage("sound", sound_tasks)


@pytest.mark.process
def test_what_crashes_or_hangs_costs_no_other_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In forked processes, which need no imports; on a GPU they are spawned."""
    forked = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: forked)
    setting = setting_at(tmp_path)
    session = begin_session(setting, {})
    found = run_stage(Stage("fragile", fragile_tasks), setting, session=session, is_isolated=True)
    assert found["measured"] == ["works"]
    assert found["FAILED"] == ["hangs", "crashes"]
    assert found["left for another session"] == ["is long"]
    assert read_record(setting.record).stages["fragile"]["works"].values == {"answer": 42}


def test_the_reason_of_a_failure_is_filed_and_the_next_measurement_is_made(tmp_path: Path) -> None:
    setting = setting_at(tmp_path)
    stage = Stage("failing", lambda _: {"fails": Task(fail, 0), "works": Task(succeed, 0)})
    found = run_stage(stage, setting, session=begin_session(setting, {}), is_isolated=False)
    assert (found["FAILED"], found["measured"]) == (["fails"], ["works"])
    filed = read_record(setting.record).stages["failing"]
    assert filed["fails"].failed == "RuntimeError: CUDA error: an illegal memory access"


def test_a_session_repeats_nothing_but_what_failed_and_can_be_about_some_measurements_only(tmp_path: Path) -> None:
    setting = setting_at(tmp_path)
    begin_session(setting, {})
    add_measurement(setting, "sound", "a", Measurement(session=0, seconds=1))
    add_measurement(setting, "sound", "b", Measurement(session=0, seconds=1, failed="no"))
    setting = dataclasses.replace(setting, only=("b", "a"))
    found = run_stage(SOUND, setting, session=begin_session(setting, {}), is_isolated=False)
    assert {kind: names for kind, names in found.items() if names} == {
        "from an earlier session": ["a"],
        "measured": ["b"],
    }


def test_what_was_measured_on_another_gpu_is_measured_again(tmp_path: Path) -> None:
    setting = setting_at(tmp_path)
    for device, measured in (("NVIDIA H200", ["a", "b", "c"]), ("NVIDIA H200", []), ("NVIDIA H100", ["a", "b", "c"])):
        session = begin_session(setting, {"device": device})
        assert run_stage(SOUND, setting, session=session, is_isolated=False)["measured"] == measured
