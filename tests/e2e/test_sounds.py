"""Sounds from end to end: made or one's own, trained on, probed, looked at."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from configs import resolve_recipe
from data_pipeline import __main__ as data_pipeline
from data_pipeline.building.build import build_dataset
from data_pipeline.tools.preview import draw_grid
from launch import train as launch_train
from tests.commands import Call
from trainer import analyze, probe, report
from trainer.pretrained import load_modules
from trainer.probed_runs.probing import ProbeOptions, probe_run
from trainer.run_dir import RunDir
from trainer.train import train


def test_sounds_from_nothing_to_probes(tmp_path: Path, call: Call) -> None:
    for split, limit in (("train", 16), ("test", 16)):
        made = ["--source", "procedural", "--overlay", "online", "--split", split, "--limit", str(limit)]
        call(data_pipeline.main, "build", "spoken_noise", *made, "--out", tmp_path / split)
    settings = [f"data.train_dir={tmp_path / 'train'}", f"data.test_dir={tmp_path / 'test'}", "tracking.wandb=disabled"]
    settings += ["global_batch_size=8", "num_epochs=1", "probe.num_epochs=1"]
    run_dir = RunDir(tmp_path / "run")
    sets = [word for setting in settings for word in ("--set", setting)]
    call(launch_train.main, "--config", "debug:audio_viewmaker", "--run-dir", run_dir.path, *sets)
    metrics = run_dir.read_metrics()
    assert len(metrics) == 2
    assert all(abs(entry["views/budget_spent"] - 0.125) < 1e-3 for entry in metrics)
    assert "views/clamped_share" not in metrics[0]
    table = call(probe.main, run_dir.path).stdout
    assert "label_base" in table
    assert "label_overlay" in table
    call(analyze.main, "views", run_dir.path)
    assert json.loads((run_dir.analysis / "views.json").read_text())["num_pictures"] == 16
    call(report.main, run_dir.path)
    assert run_dir.report.is_file()


@pytest.fixture(scope="module")
def own_sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build stereo sounds of 1.5 s at 22,050 points a second, of two classes that differ in pitch."""
    root = tmp_path_factory.mktemp("own")
    time = np.arange(33_075) / 22_050
    for number in range(32):
        pitch, split = ("low", "high")[number % 2], ("train", "test")[number // 16]
        tone = np.sin(2 * np.pi * {"low": 300, "high": 3_000}[pitch] * (1 + number / 100) * time)
        path = root / "flac" / split / pitch / f"{number}.flac"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, 0.3 * np.stack([tone, np.roll(tone, 5)], axis=1), 22_050)
    for split in ("train", "test"):
        manifest = build_dataset("sounds", root / split, split=split, root=root / "flac")
        assert (manifest.sample_rate, manifest.input_shape) == (22_050, (33_075,))
    draw_grid(str(root / "train"), num_samples=4)
    return root


@pytest.mark.parametrize(
    ("recipe", "views"),
    [
        ("audio:folder_small", []),
        ("audio:folder_small", ["views={kind: waveform, speed: [0.9, 1.1], semitones: [-3, 3]}"]),
        ("audio:folder_viewmaker_small", ["views.base_width=4", "views.waveform={}"]),
    ],
)
def test_own_sounds_are_trained_on_and_probed_at_their_rate_and_length(
    own_sounds: Path, tmp_path: Path, recipe: str, views: list[str]
) -> None:
    where = [f"data.{split}_dir={own_sounds / split}" for split in ("train", "test")]
    small = [
        "encoder.width=4",
        "global_batch_size=8",
        "num_epochs=1",
        "tracking.wandb=disabled",
        "probe.num_epochs=2",
    ]
    config = resolve_recipe(recipe, [*where, *small, *views, "probe.views=policy", "watchdog.enabled=false"])
    assert config.data.sample_rate == "of_data"
    run_dir = RunDir(tmp_path / "run")
    train(config, run_dir, device=torch.device("cpu"), command="train")
    assert len(run_dir.read_metrics()) == 2
    mel = load_modules(run_dir).config.data.mel
    assert mel is not None
    assert (mel.sample_rate, mel.num_points, mel.num_frames) == (22_050, 33_075, 64)
    results = probe_run(run_dir, ProbeOptions(), device=torch.device("cpu"))
    assert set(results) == {"base"}
