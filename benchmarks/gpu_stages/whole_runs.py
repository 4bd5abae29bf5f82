"""Check whole runs on the GPU: neither a restart nor an online probe changes a loss, and recorded steps are plain ones.

The other checks compare single steps. A run also reads its data, probes and saves between replays of a recorded step.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from benchmarks.gpu_stages.data import procedural_pair
from benchmarks.gpu_stages.session import Outcome, Setting
from benchmarks.record import rounded
from configs import resolve_recipe
from launch.rank import train_on
from trainer.run_dir import RunDir, steps_in

_PROBED: Final = ("compile=auto", "probe.online_every_steps=7")
_PLAIN: Final = ("compile=false",)
_FORM: Final = ("precision=bfloat16", "channels_last=true", "num_epochs=4", "checkpoint_every_steps=20")
_TINY_FORM: Final = (
    *("encoder.kind=resnet10", "encoder.width=4", "global_batch_size=8", "data.num_workers=0"),
    *("num_epochs=2", "checkpoint_every_steps=3", "probe.online_num_train=16", "probe.online_num_test=8"),
)
_EXACT_RATE: Final = "optimizer.learning_rate=0.03125"  # a replay reads its rate in float32, which holds this one
_AT_MOST: Final = 1e-3


def restart_against_whole(setting: Setting) -> Outcome:
    """Compare the losses of a run in four ways: whole, whole again, from its first checkpoint on, and with plain steps.

    Kernels may sum in another order each time, so two whole runs may differ. The others may differ ten times as much.
    """
    with tempfile.TemporaryDirectory(dir=setting.out) as name:
        directory = Path(name)
        whole = _losses(setting, directory / "whole", *_PROBED)
        again = _losses(setting, directory / "again", *_PROBED)
        first_step = _go_back(RunDir(directory / "again"))
        gone_on = _losses(setting, directory / "again", *_PROBED)
        plain = _losses(setting, directory / "plain", *_PLAIN)
        replays = [_replays(directory / name) for name in ("whole", "again", "plain")]
    found = {"again": again, "from_a_checkpoint": gone_on, "plain_without_a_probe": plain}
    apart = {name: float((losses - whole).norm() / whole.norm()) for name, losses in found.items()}
    values = {"num_steps": len(whole), "first_checkpoint": first_step, "are_recorded": replays}
    values |= {f"relative_difference_{name}": rounded(each) for name, each in apart.items()}
    is_gpu = setting.device.type == "cuda"
    return Outcome(
        values | {"losses": [rounded(loss) for loss in whole.tolist()]},
        holds=max(apart.values()) <= max(10 * apart["again"], _AT_MOST) and replays == [is_gpu, is_gpu, False],
    )


def _losses(setting: Setting, run_dir: Path, *overrides: str) -> Tensor:
    """Train, and return the loss of every step."""
    train, test = procedural_pair(setting)
    settings = (f"data.train_dir={train}", f"data.test_dir={test}", "tracking.wandb=disabled", "log_every_steps=1")
    form = _TINY_FORM if setting.is_tiny else _FORM
    config = resolve_recipe("simclr:digits", [*settings, "keep_checkpoints=9", _EXACT_RATE, *form, *overrides])
    train_on(setting.device, config, run_dir, command="benchmarks.gpu")
    by_step = {entry["step"]: entry["train/loss"] for entry in RunDir(run_dir).read_metrics() if "train/loss" in entry}
    return torch.tensor([by_step[step] for step in sorted(by_step)], dtype=torch.float64)


def _replays(run_dir: Path) -> bool:
    """Return whether the last step of a run was a replay."""
    *_, last = (entry for entry in RunDir(run_dir).read_metrics() if "train/loss" in entry)
    return float(last.get("perf/replay_fraction", 0)) > 0


def _go_back(run_dir: RunDir) -> int:
    """Remove what came after the first checkpoint, as if the run had been killed then, and return its step."""
    first, *later = steps_in(run_dir.checkpoints)
    for step in later:
        shutil.rmtree(run_dir.checkpoint(step))
    run_dir.latest.write_text(f"{run_dir.checkpoint(first).name}\n", encoding="utf-8")
    kept = [entry for entry in run_dir.read_metrics() if entry["step"] <= first]
    run_dir.metrics.write_text("".join(f"{json.dumps(entry)}\n" for entry in kept), encoding="utf-8")
    return first
