"""Metrics always reach metrics.jsonl, and offline W&B files as one run; a failure of W&B harms nothing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import wandb

from configs import resolve_recipe
from tests.nursery import run_python
from trainer.observability.tracking import TrackingConfig, uses_wandb
from trainer.observability.wandb_run import offline_steps, summarize
from trainer.run_dir import RunDir
from trainer.training_log import open_tracker

ROOT = Path(__file__).parents[3]
ENDED_WITH_ITS_JOB = """
import os, signal, sys, time
from pathlib import Path
from configs import resolve_recipe
from trainer.training_log import open_tracker
from trainer.run_dir import RunDir
tracker = open_tracker(RunDir(Path(sys.argv[1])), resolve_recipe("debug:image"))
for step in range(1, 5):
    tracker.log(step, {"train/loss": 1.0 / step})
(core,) = (
    int(path.parent.name)
    for path in Path("/proc").glob("[0-9]*/stat")
    if "(wandb-core)" in path.read_text() and int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid()
)
os.kill(core, signal.SIGTERM)
while Path(f"/proc/{core}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
    time.sleep(0.05)
tracker.log(5, {"train/loss": 0.2})
os._exit(0)
"""


def wandb_steps(run_dir: RunDir) -> list[int]:
    """Return the steps of all starts, one start after another."""
    paths = sorted(run_dir.path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert len({path.name for path in paths}) == 1
    return [step for path in paths for step in offline_steps(path)]


@pytest.mark.parametrize("wandb_mode", [None, "offline", "online", "disabled"])
def test_the_environment_cannot_switch_on_what_the_config_disables(
    wandb_mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if wandb_mode is not None:
        monkeypatch.setenv("WANDB_MODE", wandb_mode)
    assert not uses_wandb(TrackingConfig(wandb="disabled"))
    assert uses_wandb(TrackingConfig(wandb="online")) == (wandb_mode != "disabled")


def log_steps(run_dir: RunDir, *, start_step: int, steps: Iterable[int]) -> None:
    tracker = open_tracker(run_dir, resolve_recipe("debug:image"), start_step=start_step)
    for step in steps:
        tracker.log(step, {"train/loss": 1.0})
    tracker.close()


@pytest.mark.parametrize(
    ("second_start", "logged", "sent"),
    [((2, range(3, 7)), [1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6]), ((0, range(2)), [0, 1], [0, 1, 2, 3, 4])],
)
def test_wandb_gets_no_step_twice_where_a_run_goes_back(
    second_start: tuple[int, range], logged: list[int], sent: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 0 is the untrained encoder; a start from there begins the metrics again."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = RunDir(tmp_path)
    log_steps(run_dir, start_step=0, steps=range(5))
    start_step, steps = second_start
    log_steps(run_dir, start_step=start_step, steps=steps)
    assert [entry["step"] for entry in run_dir.read_metrics() if entry["step"] or not start_step] == logged
    assert wandb_steps(run_dir) == sent


def test_two_starts_offline_are_one_wandb_run_and_the_log_says_how_to_sync_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says it once for each start, before the first step, so also of a run that is killed."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    caplog.set_level(logging.INFO, logger="trainer.observability.wandb_run")
    run_dir = RunDir(tmp_path / "a run")
    run_dir.path.mkdir()
    for start_step in (0, 2):
        log_steps(run_dir, start_step=start_step, steps=(start_step + 1, start_step + 2))
    run_id = run_dir.wandb_run_id.read_text().strip()
    folders = sorted((run_dir.path / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert len(folders) == 2
    told = [record.message for record in caplog.records if "wandb sync" in record.message]
    assert [message.partition(" ")[0] for message in told] == ["Weights"] * 2
    commands = [message.partition("wandb sync ")[2] for message in told]
    one, both = f"'{folders[0].parent}'", f"'{run_dir.path}/wandb'/offline-run-*"
    assert commands == [one, both]
    assert wandb_steps(run_dir) == [1, 2, 3, 4]
    assert [entry["step"] for entry in run_dir.read_metrics()] == [1, 2, 3, 4]


@pytest.mark.process
def test_what_wandb_had_not_written_when_its_process_was_ended_comes_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM reaches all processes of a job; W&B's own ends at once and loses what it has in memory."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = RunDir(tmp_path)
    ended = run_python([sys.executable, "-c", ENDED_WITH_ITS_JOB, str(tmp_path)], cwd=ROOT, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert wandb_steps(run_dir) != [1, 2, 3, 4, 5], "nothing was lost, so this test shows nothing"
    tracker = open_tracker(run_dir, resolve_recipe("debug:image"), start_step=5)
    tracker.log(6, {"train/loss": 0.1})
    tracker.close()
    assert wandb_steps(run_dir) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("fails", ["init", "log"])
def test_a_failing_wandb_is_reported_once_and_closed_and_training_goes_on(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host")

    with monkeypatch.context() as failing:
        failing.setattr(wandb if fails == "init" else wandb.Run, fails, fail)
        tracker = open_tracker(RunDir(tmp_path), resolve_recipe("debug:image", ["tracking.wandb=offline"]))
        tracker.log(1, {"train/loss": 1.0})
        tracker.log(2, {"train/loss": 0.5})
    tracker.close()
    assert [entry["step"] for entry in RunDir(tmp_path).read_metrics()] == [1, 2]
    assert len([record for record in caplog.records if "no route to host" in record.message]) == 1
    assert wandb.setup().most_recent_active_run is None


def test_a_wandb_run_that_is_open_stays_open_and_gets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook may have a run of its own."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    own = wandb.init(dir=tmp_path, mode="offline", settings=wandb.Settings(silent=True))
    try:
        run_dir, config = RunDir(tmp_path / "run"), resolve_recipe("debug:image")
        run_dir.path.mkdir()
        tracker = open_tracker(run_dir, config)
        tracker.log(7, {"train/loss": 1.0})
        tracker.close()
        summarize(run_dir, config.tracking, {"probe/base/linear": 0.5})
        assert wandb.run is own
        own.log({"mine": 1.0}, step=3)
    finally:
        own.finish()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert offline_steps(file) == [3]
    assert wandb_steps(run_dir) == [7]
