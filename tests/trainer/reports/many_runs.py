"""Hundreds of run directories from one real run: its files with other names, settings and numbers."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.sweep import read_space, resolve_sweep
from launch.planned_run import default_run_dir
from tests.tiny_data import write_tiny_pair
from trainer.analyses.views import analyze_views
from trainer.probe import main as probe
from trainer.reports.config_identity import run_identity
from trainer.run_dir import RunDir, write_json
from trainer.train import train

CPU = torch.device("cpu")
_LOSS = "train/loss"


def train_one(directory: Path, *, epochs: int = 4) -> RunDir:
    """Train, probe and analyse a tiny run in `directory`/run, and return it."""
    data = write_tiny_pair(directory / "data", num_train=64, num_test=32)
    settings = [f"data.train_dir={data / 'train'}", f"data.test_dir={data / 'test'}", "data.num_workers=0"]
    settings += [f"num_epochs={epochs}", "global_batch_size=16", "tracking.wandb=disabled", "watchdog.enabled=false"]
    (config,) = resolve_sweep("debug:image", read_space(["seed=0"], None, overrides=settings), overrides=settings).runs
    run_dir = RunDir(directory / "run")
    train(config, run_dir, device=CPU, command="python launch/train.py --config debug:image")
    _probe(run_dir)
    analyze_views(run_dir)
    return run_dir


def _probe(run_dir: RunDir) -> None:
    before = sys.argv
    sys.argv = ["probe", str(run_dir.path), "--untrained"]
    try:
        probe()
    finally:
        sys.argv = before


def multiply(run_dir: RunDir, home: Path, sweeps: Sequence[str], *, num_lines: int, seed: int = 0) -> list[Path]:
    """Write the runs of a sweep of `run_dir` into `home`, without training them, and return their directories.

    Every file of a run is that of `run_dir` with other numbers. The accuracy falls with the distance of the temperature
    from 0.2 and of the learning rate from 0.03.
    """
    rng = np.random.default_rng(seed)
    space = read_space(sweeps, None, overrides=[])
    sweep = resolve_sweep(str(run_dir.config), space, overrides=[], group=home.name)
    steps = range(1, num_lines + 1)
    lines = [{name: value for name, value in line.items() if name != _LOSS} for line in run_dir.read_metrics()]
    texts = [json.dumps(lines[(step - 1) % len(lines)] | {"step": step}) for step in steps]
    found = []
    for config in sweep.runs:
        made = RunDir(home / default_run_dir(config).name)
        made.path.mkdir(parents=True)
        write_json(made.config, config.model_dump(mode="json"))
        write_json(made.provenance, run_dir.read_provenance() | {"seed": config.seed})
        temperature = getattr(config.objective, "temperature", 0.5)
        distance = abs(np.log10(temperature / 0.2)) + 0.7 * abs(np.log10(config.optimizer.learning_rate / 0.03))
        quality = 1 / (1 + distance) + 0.02 * rng.standard_normal()
        losses = (3 - 2 * quality) * (1 + 5 / np.array(steps)) + 0.05 * rng.standard_normal(num_lines)
        with made.metrics.open("w") as file:
            for text, loss in zip(texts, losses.tolist(), strict=True):
                file.write(f'{text.removesuffix("}")}, "{_LOSS}": {loss}}}\n')
        for path in sorted(run_dir.all_probes.glob("step_*/*.json")):
            result: dict[str, Any] = json.loads(path.read_text())
            result["run"] = run_identity(config, made.read_provenance())
            if result["checkpoint_step"] > 0:
                accuracy = float(np.clip(0.3 + 0.5 * quality, 0, 1))
                result["linear"] |= {"accuracy": accuracy, "best_accuracy": accuracy}
                result["linear"]["accuracy_by_epoch"][-1] = accuracy
                result["knn"]["accuracy"] = max(0.0, accuracy - 0.05)
            write_json(made.all_probes / path.parent.name / path.name, result)
        shutil.copytree(run_dir.analysis, made.analysis)
        found.append(made.path)
    return found
