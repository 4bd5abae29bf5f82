"""A run is marked as finished once its last checkpoint is written, also if it is killed right after."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from configs import resolve_recipe
from launch.states import status_of
from tests.tiny_data import on_data, write_tiny_pair
from trainer.checkpoint.restore import newest_state
from trainer.config import RunConfig
from trainer.fault_tolerance.preemption import StoppedError, StopRequests
from trainer.run_dir import RunDir, write_json
from trainer.train import train
from trainer.training_log import TrainingLog

NUM_STEPS = 4


class KilledError(Exception):
    """Stands for the end of a process by a signal."""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Return the config of a run of 4 steps."""
    data = write_tiny_pair(tmp_path / "data", num_train=16, num_test=8)
    small = ("data.num_workers=0", "global_batch_size=8", "num_epochs=2", "watchdog.enabled=false")
    return resolve_recipe("debug:image", on_data(data, *small, "tracking.wandb=disabled"))


def start(run_dir: RunDir, config: RunConfig) -> None:
    train(config, run_dir, device=torch.device("cpu"), command="train")


def test_a_run_that_is_killed_while_its_log_is_closed_is_finished(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_: TrainingLog, *__: object) -> None:
        raise KilledError

    monkeypatch.setattr(TrainingLog, "__exit__", killed)
    run_dir = RunDir(tmp_path / "run")
    with pytest.raises(KilledError):
        start(run_dir, config)
    assert run_dir.read_provenance()["finished_step"] == NUM_STEPS


def test_a_start_at_the_last_step_marks_the_run_as_finished(config: RunConfig, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    start(run_dir, config)
    finished = json.loads(run_dir.provenance.read_text())
    left = {name: value for name, value in finished.items() if name not in {"finished_step", "total_wall_seconds"}}
    write_json(run_dir.provenance, left)  # as a kill right after the last checkpoint leaves it
    assert status_of(run_dir, queue=None).state != "finished"
    start(run_dir, config)
    assert json.loads(run_dir.provenance.read_text()) == left | {"finished_step": NUM_STEPS}
    assert status_of(run_dir, queue=None).state == "finished"
    write_json(run_dir.provenance, finished)
    start(run_dir, config)
    assert json.loads(run_dir.provenance.read_text()) == finished


def test_the_wall_time_of_a_run_is_that_of_all_its_starts(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path / "run")
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def train_steps(_: TrainingLog, *__: object) -> str:
        nonlocal now
        now += 50
        return ""

    monkeypatch.setattr(TrainingLog, "add", train_steps)
    for number in (1, 2):
        now += 1000  # between two starts
        with monkeypatch.context() as stopping:
            stopping.setattr(StopRequests, "agreed", lambda _: True)
            with pytest.raises(StoppedError):
                start(run_dir, config)
        assert newest_state(run_dir).step == number
    start(run_dir, config)
    assert run_dir.read_provenance()["total_wall_seconds"] == NUM_STEPS * 50
