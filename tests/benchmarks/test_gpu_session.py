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

from benchmarks.gpu_stages import session
from benchmarks.gpu_stages.session import (
    Measurement,
    Outcome,
    Record,
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
    number = begin_session(setting, {})
    found = run_stage(Stage("fragile", fragile_tasks), setting, session=number, is_isolated=True)
    assert found["measured"] == ["works"]
    assert [said.partition(" (")[0] for said in found["FAILED"]] == ["hangs", "crashes"]
    assert found["left for another session"] == ["is long"]
    assert read_record(setting.record).stages["fragile"]["works"].values == {"answer": 42}


def test_the_reason_of_a_failure_is_filed_and_the_next_measurement_is_made(tmp_path: Path) -> None:
    setting = setting_at(tmp_path)
    stage = Stage("failing", lambda _: {"fails": Task(fail, 0), "works": Task(succeed, 0)})
    found = run_stage(stage, setting, session=begin_session(setting, {}), is_isolated=False)
    reason = "RuntimeError: CUDA error: an illegal memory access"
    assert (found["FAILED"], found["measured"]) == ([f"fails ({reason})"], ["works"])
    assert read_record(setting.record).stages["failing"]["fails"].failed == reason


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


@pytest.mark.parametrize("is_about_speed", [True, False])
def test_speed_is_that_of_a_card_and_a_commit_and_accuracies_are_those_of_all(
    tmp_path: Path, is_about_speed: bool
) -> None:
    setting, stage = setting_at(tmp_path), dataclasses.replace(SOUND, is_about_speed=is_about_speed)
    again = ["a", "b", "c"] if is_about_speed else []
    for device, commit, measured in (
        ("NVIDIA H200", "1", ["a", "b", "c"]),
        ("NVIDIA H200", "1", []),
        ("NVIDIA H200", "2", again),
        ("NVIDIA H100", "2", again),
    ):
        number = begin_session(setting, {"device": device, "git_commit": commit})
        assert run_stage(stage, setting, session=number, is_isolated=False)["measured"] == measured


def test_a_session_begins_with_the_filed_record_of_its_card_and_knows_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "FILED", tmp_path / "filed")
    setting = dataclasses.replace(setting_at(tmp_path / "filed"), is_tiny=False)
    for card, name in (("cpu", "a"), ("h9", "b")):
        filed = Record(sessions=({"device": card},), stages={"sound": {name: Measurement(session=0, seconds=1)}})
        session.write_record(setting.out / f"gpu_{card}.json", filed)
    setting, stage = (
        dataclasses.replace(setting, out=tmp_path / "new"),
        dataclasses.replace(SOUND, is_about_speed=False),
    )
    found = run_stage(stage, setting, session=begin_session(setting, {"device": "cpu"}), is_isolated=False)
    assert (found["from an earlier session"], found["measured"]) == (["a", "b"], ["c"])
    assert {one.session for one in read_record(setting.record).stages["sound"].values()} == {0, 1}
