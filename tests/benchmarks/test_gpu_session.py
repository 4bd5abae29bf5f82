"""Sessions on a lent machine: what fails, crashes, hangs or is interrupted, and what an earlier session has filed.

A file of its own, which imports little: its stages run in new processes, which import it.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_stages.session import (
    Interrupted,
    Measurement,
    Outcome,
    Setting,
    Stage,
    Task,
    add_measurement,
    begin_session,
    read_record,
    run_stage,
    task,
)
from data_pipeline.core.errors import UserError


def setting_at(directory: Path) -> Setting:
    return Setting(
        device=torch.device("cpu"),
        out=directory / "out",
        data=directory / "data",
        runs=directory / "runs",
        is_tiny=True,
        ends_at=time.time() + 600,
    )


def succeed() -> Outcome:
    return Outcome({"answer": 42})


def fail() -> Outcome:
    raise RuntimeError("CUDA error:\n  an illegal memory access")


def crash() -> Outcome:
    os._exit(7)


def hang() -> Outcome:
    time.sleep(600)
    return Outcome({})


def be_interrupted() -> Outcome:
    raise Interrupted(Outcome({"step": 3}, is_finished=False))


def fragile_tasks(_: Setting) -> Mapping[str, Task]:
    tasks = {"fails": fail, "crashes": crash, "works": succeed}
    found = {name: task(run, needs_seconds=1) for name, run in tasks.items()}
    found["hangs"] = Task(hang, needs_seconds=1, limit_seconds=0.5)
    return found | {"is long": task(succeed, needs_seconds=10_000), "also works": task(succeed, needs_seconds=0)}


@pytest.mark.process
def test_what_fails_crashes_or_hangs_costs_no_other_measurement(tmp_path: Path) -> None:
    setting = setting_at(tmp_path)
    session = begin_session(setting, {})
    tally = run_stage(Stage("fragile", fragile_tasks), setting, session=session, is_isolated=True)
    assert (tally.done, tally.failed, tally.left) == (
        ["works", "also works"],
        ["fails", "crashes", "hangs"],
        ["is long"],
    )
    found = read_record(setting.record).stages["fragile"]
    assert found["fails"].failed == "RuntimeError: CUDA error: an illegal memory access"
    assert found["crashes"].failed == "its process ended with exit code 7"
    assert found["hangs"].failed == "it took more than 0 s"
    assert found["works"].values == {"answer": 42}


def sound_tasks(_: Setting) -> Mapping[str, Task]:
    return {name: task(succeed, needs_seconds=0) for name in ("a", "b", "c")}


def test_a_session_can_be_about_some_measurements_only(tmp_path: Path) -> None:
    setting = dataclasses.replace(setting_at(tmp_path), only=("c", "a"))
    session = begin_session(setting, {})
    tally = run_stage(Stage("sound", sound_tasks), setting, session=session, is_isolated=False)
    assert (tally.done, tally.left) == (["a", "c"], [])


def test_a_session_repeats_nothing_but_what_failed_or_is_unfinished(tmp_path: Path) -> None:
    setting = setting_at(tmp_path)
    stage = Stage("sound", sound_tasks)
    begin_session(setting, {})
    add_measurement(setting, "sound", "a", Measurement(session=0, seconds=1))
    add_measurement(setting, "sound", "b", Measurement(session=0, seconds=1, failed="no", is_finished=False))
    tally = run_stage(stage, setting, session=begin_session(setting, {}), is_isolated=False)
    assert (tally.earlier, tally.done) == (["a"], ["b", "c"])
    other = dataclasses.replace(setting, out=tmp_path / "other", known=(setting.record,))
    tally = run_stage(stage, other, session=begin_session(other, {}), is_isolated=False)
    assert (tally.earlier, tally.done) == (["a", "b", "c"], [])
    tally = run_stage(stage, other, session=0, is_isolated=False, again=True)
    assert tally.done == ["a", "b", "c"]


def test_what_is_about_another_gpu_is_measured_again_and_a_run_is_not(tmp_path: Path) -> None:
    filed = setting_at(tmp_path)
    begin_session(filed, {"device": "NVIDIA H200"})
    setting = dataclasses.replace(filed, out=tmp_path / "other", known=(filed.record,))
    for name in ("speed", "run"):
        add_measurement(filed, name, "a", Measurement(session=0, seconds=1))
    for device, num_earlier in (("NVIDIA H100", 0), ("NVIDIA H200", 1)):
        session = begin_session(setting, {"device": device})
        tally = run_stage(Stage("speed", sound_tasks), setting, session=session, is_isolated=False)
        assert tally.earlier.count("a") == num_earlier
        tally = run_stage(Stage("run", sound_tasks, is_of_the_gpu=False), setting, session=session, is_isolated=False)
        assert "a" in tally.earlier


def test_a_gpu_that_cannot_be_used_fails_the_measurement_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Setting) -> None:
        raise RuntimeError("CUDA-capable device(s) is/are busy or unavailable")

    monkeypatch.setattr(Setting, "free_memory", refuse)
    tally = run_stage(Stage("sound", sound_tasks), setting_at(tmp_path), session=1, is_isolated=False)
    assert tally.failed
    made = read_record(setting_at(tmp_path).record).measurement("sound", tally.failed[0])
    assert made is not None
    assert "busy or unavailable" in str(made.failed)


def interrupted_tasks(_: Setting) -> Mapping[str, Task]:
    return {name: task(run, needs_seconds=0) for name, run in {"a": succeed, "b": be_interrupted, "c": succeed}.items()}


def test_an_interrupted_session_keeps_what_it_has(tmp_path: Path) -> None:
    setting = setting_at(tmp_path)
    session = begin_session(setting, {})
    with pytest.raises(KeyboardInterrupt):
        run_stage(Stage("cut", interrupted_tasks), setting, session=session, is_isolated=False)
    found = read_record(setting.record).stages["cut"]
    assert found["a"].is_done
    assert (found["b"].values, found["b"].is_done) == ({"step": 3}, False)
    assert "c" not in found


def test_a_damaged_record_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text('{"sessions": [')
    with pytest.raises(UserError, match=r"gpu\.json is not valid JSON .* pass another --out"):
        read_record(tmp_path / "gpu.json")
