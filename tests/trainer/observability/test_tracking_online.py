"""What a W&B server gets, by a stand-in server; and what TensorBoard's own reader reads."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from configs import resolve_recipe
from configs.resolve import resolve_study
from tests.nursery import run_python
from tests.trainer.observability.stand_in_wandb import StandIn, stand_in_server
from trainer.config import RunConfig
from trainer.observability import wandb_run
from trainer.observability.tracking import StepPictures
from trainer.observability.wandb_run import offline_steps, summarize
from trainer.run_dir import RunDir
from trainer.training_log import open_tracker

ROOT = Path(__file__).parents[3]
TWO_STEPS = """
import sys
from pathlib import Path
from configs import resolve_recipe
from trainer.training_log import open_tracker
from trainer.observability import wandb_run
from trainer.run_dir import RunDir
wandb_run.INIT_SECONDS = 3
config = resolve_recipe("debug:image", ["tracking.wandb=" + sys.argv[2]])
tracker = open_tracker(RunDir(Path(sys.argv[1])), config)
for step in (1, 2):
    tracker.log(step, {"train/loss": 1.0})
tracker.close()
"""

CHANGES = {
    "views/change": np.array([1, 1, 1, np.nan, np.inf], np.float32),
    "views/nothing": np.full(3, np.nan, np.float32),
}
PICTURES = StepPictures({"views/grid": np.zeros((4, 6, 3), np.uint8)}, CHANGES)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with stand_in_server(monkeypatch) as stand_in:
        yield stand_in


def train(run_dir: RunDir, config: RunConfig, *, start_step: int, last: int) -> list[float]:
    """Return the seconds that each step's log took."""
    tracker, seconds = open_tracker(run_dir, config, start_step=start_step), []
    for step in range(start_step + 1, last + 1):
        started = time.perf_counter()
        tracker.log(step, {"train/loss": 1.0 / step})
        seconds.append(time.perf_counter() - started)
    tracker.log_pictures(last, PICTURES)
    tracker.close()
    return seconds


@pytest.mark.slow
def test_two_starts_online_are_one_run_with_its_study_pictures_and_summary(server: StandIn, tmp_path: Path) -> None:
    run_dir, config = RunDir(tmp_path), resolve_study("studies:table1_small")[0]
    train(run_dir, config, start_step=0, last=4)
    train(run_dir, config, start_step=4, last=6)
    summarize(run_dir, config.tracking, {"probe/base/linear": 0.5, "probe/overlay/linear": 0.25})
    ((run_id, run),) = server.runs.items()
    assert run_id == run_dir.wandb_run_id.read_text().strip()
    assert run.steps == [1, 2, 3, 4, 5, 6]
    assert (run.tags, run.group, run.job_type) == (["table1_small"], "table1_small", "train")
    assert run.config["encoder"]["value"]["kind"] == "resnet10"
    assert [name for name in run.files if name.startswith("media/images/views/grid_6")]
    assert json.loads(run.history[-1])["views/change"]["_type"] == "histogram"
    assert (run.summary["probe/base/linear"], run.summary["probe/overlay/linear"]) == (0.5, 0.25)
    assert run.summary["train/loss"] == 1 / 6


@pytest.mark.process
def test_what_was_written_offline_is_synchronised_as_wandb_documents(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, config = RunDir(tmp_path), resolve_recipe("debug:image")
    with monkeypatch.context() as offline:
        offline.setenv("WANDB_MODE", "offline")
        train(run_dir, config, start_step=0, last=3)
        train(run_dir, config, start_step=3, last=5)
    assert not server.runs
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    subprocess.run([sys.executable, "-m", "wandb", "sync", *map(str, folders)], cwd=tmp_path, check=True, timeout=120)
    ((run_id, run),) = server.runs.items()
    assert run_id == run_dir.wandb_run_id.read_text().strip()
    assert run.steps == [1, 2, 3, 4, 5]


def test_a_slow_server_costs_a_step_nothing(server: StandIn, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    tracker = open_tracker(run_dir, resolve_recipe("debug:image"))
    server.delay = 5.0
    started = time.perf_counter()
    for step in range(1, 101):
        tracker.log(step, {"train/loss": 1.0 / step})
    assert time.perf_counter() - started < 4.0
    server.delay = 0.0
    tracker.close()
    ((_, run),) = server.runs.items()
    assert run.steps == list(range(1, 101))


@pytest.mark.slow
def test_a_server_that_stops_answering_does_not_keep_a_run_from_its_end(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wandb_run, "FINISH_SECONDS", 1.0)
    tracker = open_tracker(RunDir(tmp_path), resolve_recipe("debug:image"))
    server.delay = 60.0
    tracker.log(1, {"train/loss": 1.0})
    started = time.perf_counter()
    tracker.close()
    assert time.perf_counter() - started < 20
    assert "the missing steps are in RUN_DIR/wandb, for `wandb sync`" in caplog.text


@pytest.mark.process
def test_a_dead_server_means_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test uses a process of its own, because W&B's library remembers a login."""
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    for name in ("WANDB_SERVICE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    done = run_python([sys.executable, "-c", TWO_STEPS, str(tmp_path), "online"], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "going on offline" in done.stderr
    ((folder, steps),) = [
        (path.parent.name, offline_steps(path)) for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    ]
    assert folder.startswith("offline-run-")
    assert steps == [1, 2]
    assert [entry["step"] for entry in RunDir(tmp_path).read_metrics()] == [1, 2]


@pytest.mark.process
def test_an_offline_run_asks_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's library would tell its server about itself, at the end of the process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        for name in ("WANDB_SERVICE", "WANDB_MODE"):
            monkeypatch.delenv(name, raising=False)
        done = run_python([sys.executable, "-c", TWO_STEPS, str(tmp_path), "offline"], cwd=ROOT)
        assert done.returncode == 0, done.stderr
        with pytest.raises(BlockingIOError):
            server.accept()


def test_tensorboard_has_every_step_once_and_the_pictures(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = resolve_recipe("debug:image", ["tracking.tensorboard=true", "tracking.wandb=disabled"])
    run_dir = RunDir(tmp_path)
    train(run_dir, config, start_step=0, last=4)
    train(run_dir, config, start_step=2, last=6)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx([1 / step for step in range(1, 7)])
    assert events.Images("views/grid")[-1].step == 6
    assert events.Histograms("views/change")[-1].histogram_value.num == 3
