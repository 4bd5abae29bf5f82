"""Trackio gets each step once, over restarts and kills; without it, or if it fails, training goes on."""

from __future__ import annotations

import contextvars
import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from configs import resolve_recipe
from tests.trainer.observability.tracked import open_tracker
from trainer.run_dir import RunDir

OVERRIDES = ["tracking.trackio=true", "tracking.wandb=disabled", "tracking.wandb_project=mine"]


present_run: contextvars.ContextVar[str | None] = contextvars.ContextVar("present_run", default=None)


class StandIn:
    """A Trackio in memory: the steps of each run, as `trackio.init` makes them, and the runs that were finished."""

    def __init__(self) -> None:
        self.runs: dict[str, list[int]] = {}
        self.started: list[dict[str, Any]] = []
        self.finished: list[str | None] = []
        self.fails = False

    def init(self, **settings: Any) -> Any:
        self.started.append(settings)
        present_run.set(settings["name"])
        steps = self.runs.setdefault(settings["name"], [])

        def log(metrics: dict[str, float], *, step: int) -> None:
            if self.fails:
                raise RuntimeError("no room")
            print("* a message of Trackio")
            steps.append(step)

        return types.SimpleNamespace(log=log)

    def finish(self) -> None:
        self.finished.append(present_run.get())

    def get_max_step_for_run(self, project: str, name: str) -> int | None:
        assert project == "mine"
        return max(self.runs.get(name, []), default=None)


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "trackio", types.SimpleNamespace(init=stand_in.init, finish=stand_in.finish))
    monkeypatch.setitem(sys.modules, "trackio.sqlite_storage", types.SimpleNamespace(SQLiteStorage=stand_in))
    return stand_in


def test_two_starts_are_one_run_with_every_step_once(
    trackio: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, config = RunDir(tmp_path), resolve_recipe("debug:image", OVERRIDES)
    first = open_tracker(run_dir, config)
    for step in range(1, 8):
        first.log(step, {"train/loss": float(step)})
    (name,) = trackio.runs
    del trackio.runs[name][5:]  # the process was killed before it had written the last two
    second = open_tracker(run_dir, config, start_step=6)
    for step in range(7, 10):
        second.log(step, {"train/loss": 0.0})
    second.close()
    assert trackio.runs == {name: list(range(1, 10))}
    assert [start["group"] for start in trackio.started] == [config.name] * 2
    assert trackio.started[0]["config"]["objective"] == config.objective.model_dump(mode="json")
    assert capsys.readouterr().out == ""


def test_a_failing_trackio_is_reported_once_and_training_goes_on(
    trackio: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = open_tracker(RunDir(tmp_path), resolve_recipe("debug:image", OVERRIDES))
    trackio.fails = True
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            tracker.log(step, {"train/loss": 1.0})
        tracker.close()
    assert [record.getMessage() for record in caplog.records] == [
        "Trackio failed (no room); going on with metrics.jsonl"
    ]
    assert trackio.finished == list(trackio.runs)
    assert len(RunDir(tmp_path).read_metrics()) == 3


def test_the_trackio_run_of_a_notebook_stays_its_present_run(trackio: StandIn, tmp_path: Path) -> None:
    token = present_run.set("mine")
    try:
        open_tracker(RunDir(tmp_path), resolve_recipe("debug:image", OVERRIDES)).close()
        assert present_run.get() == "mine"
    finally:
        present_run.reset(token)
    assert trackio.finished == list(trackio.runs)


def test_without_trackio_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with caplog.at_level(logging.WARNING):
        tracker = open_tracker(RunDir(tmp_path), resolve_recipe("debug:image", OVERRIDES))
        tracker.log(1, {"train/loss": 1.0})
        tracker.close()
    assert "tracking.trackio needs Trackio, which is not installed" in caplog.text
    assert len(RunDir(tmp_path).read_metrics()) == 1


def test_the_real_trackio_has_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackio is in no extra of the tests: it asks for an older Pillow."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    run_dir, config = RunDir(tmp_path / "run"), resolve_recipe("debug:image", OVERRIDES)
    run_dir.path.mkdir()
    for start in (0, 5):
        tracker = open_tracker(run_dir, config, start_step=start)
        for step in range(start + 1, start + 8):
            tracker.log(step, {"train/loss": float(step)})
        tracker.close()
    name = (run_dir.path / "trackio_run").read_text().strip()
    assert sorted(entry["step"] for entry in storage.get_logs("mine", name)) == list(range(1, 13))
