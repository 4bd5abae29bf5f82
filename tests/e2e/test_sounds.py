"""Sounds from end to end: made, trained on, probed, looked at."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from data_pipeline import __main__ as data_pipeline
from launch import train as launch_train
from trainer import analyze, probe, report
from trainer.run_dir import RunDir


def test_sounds_from_nothing_to_probes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(module: Any, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        module.main()
        return capsys.readouterr().out

    for split, limit in (("train", 16), ("test", 16)):
        made = ["--source", "procedural", "--overlay", "online", "--split", split, "--limit", limit]
        call(data_pipeline, "build", "spoken_noise", *made, "--out", tmp_path / split)
    settings = [f"data.train_dir={tmp_path / 'train'}", f"data.test_dir={tmp_path / 'test'}", "tracking.wandb=disabled"]
    settings += ["global_batch_size=8", "num_epochs=1", "probe.num_epochs=1"]
    run_dir = RunDir(tmp_path / "run")
    sets = [word for setting in settings for word in ("--set", setting)]
    call(launch_train, "--config", "debug:audio_viewmaker", "--run-dir", run_dir.path, *sets)
    metrics = run_dir.read_metrics()
    assert len(metrics) == 2
    assert all(abs(entry["views/budget_spent"] - 0.125) < 1e-3 for entry in metrics)
    assert "views/clamped_share" not in metrics[0]
    table = call(probe, run_dir.path)
    assert "label_base" in table
    assert "label_overlay" in table
    call(analyze, "views", run_dir.path)
    assert json.loads((run_dir.analysis / "views.json").read_text())["num_pictures"] == 16
    call(report, run_dir.path)
    assert run_dir.report.is_file()
