"""Build the procedural pictures that a session reads, unless they are there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.gpu_stages.session import Setting

ROOT = Path(__file__).parents[2]
_NUM_PICTURES: Final = 20_000  # to measure throughput; what they show does not matter


def pictures_without_overlay(setting: Setting) -> Path:
    """Return the directory of procedural pictures of 32 x 32 on which the digits are stored, and build it if needed."""
    return _built(setting, "stored", "train", "--limit", str(64 if setting.is_tiny else _NUM_PICTURES))


def procedural_pair(setting: Setting) -> tuple[Path, Path]:
    """Return a small train set and test set, whose digits are drawn online; build them if needed."""
    options = ("--overlay", "online", "--limit", "64" if setting.is_tiny else "4096")
    return _built(setting, "online", "train", *options), _built(setting, "online", "test", *options)


def _built(setting: Setting, name: str, split: str, *options: str) -> Path:
    out = setting.data / f"procedural_digits_{name}" / split
    if not (out / "manifest.json").is_file():
        command = [sys.executable, "-m", "data_pipeline", "build", "procedural_digits", "--split", split]
        subprocess.run([*command, "--out", str(out), *options], cwd=ROOT, check=True)
    return out
