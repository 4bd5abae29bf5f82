"""Metrics reach metrics.jsonl always, and W&B's own client offline as one run; W&B failing harms nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import wandb

from configs import resolve_recipe
from trainer.rundir import RunDir
from trainer.tracking import Tracker


def test_a_restart_replaces_the_steps_it_repeats(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    config = resolve_recipe("debug:image", ["tracking.wandb=disabled"])
    first = Tracker(run_dir, config=config, start_step=0)
    for step in range(1, 8):
        first.log(step, {"train/loss": float(step)})
    with run_dir.metrics.open("a") as file:
        file.write('{"step": 8, "train/lo')  # a kill in the middle of a line
    second = Tracker(run_dir, config=config, start_step=5)
    second.log(6, {"train/loss": -6.0})
    second.close()
    assert [(entry["step"], entry["train/loss"]) for entry in run_dir.read_metrics()] == [
        *((step, float(step)) for step in range(1, 6)),
        (6, -6.0),
    ]


def test_two_starts_offline_are_one_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = RunDir(tmp_path)
    config = resolve_recipe("debug:image")
    for start_step in (0, 2):
        tracker = Tracker(run_dir, config=config, start_step=start_step)
        for step in (start_step + 1, start_step + 2):
            tracker.log(step, {"train/loss": 1.0 / step})
        tracker.close()
    run_id = run_dir.wandb_run_id.read_text().strip()
    written = list((tmp_path / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert len(written) == 2
    assert all(path.stat().st_size > 0 for path in written)
    assert [entry["step"] for entry in run_dir.read_metrics()] == [1, 2, 3, 4]


def test_a_failing_wandb_is_reported_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**_: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(wandb, "init", fail)
    run_dir = RunDir(tmp_path)
    tracker = Tracker(run_dir, config=resolve_recipe("debug:image", ["tracking.wandb=offline"]), start_step=0)
    tracker.log(1, {"train/loss": 1.0})
    tracker.log(2, {"train/loss": 0.5})
    tracker.close()
    assert [entry["step"] for entry in run_dir.read_metrics()] == [1, 2]
    assert len([record for record in caplog.records if "no route to host" in record.message]) == 1
