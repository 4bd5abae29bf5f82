"""Build the procedural pictures that a session reads, unless they are there."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from benchmarks.gpu_stages.session import Setting
from data_pipeline.building.build import build_dataset

_NUM_PICTURES: Final = 20_000  # to measure throughput; what they show does not matter


def pictures_without_overlay(setting: Setting) -> Path:
    """Return the directory of procedural pictures of 32 x 32 on which the digits are stored, and build it if needed."""
    return _built(setting, "stored", "train", limit=_NUM_PICTURES)


def procedural_pair(setting: Setting) -> tuple[Path, Path]:
    """Return a small train set and test set, whose digits are drawn online; build them if needed."""
    train, test = (_built(setting, "online", split, limit=4096, overlay="online") for split in ("train", "test"))
    return train, test


def _built(setting: Setting, name: str, split: str, *, limit: int, overlay: str | None = None) -> Path:
    out = setting.data / f"procedural_digits_{name}" / split
    if not (out / "manifest.json").is_file():
        build_dataset("procedural_digits", out, split=split, overlay=overlay, limit=64 if setting.is_tiny else limit)
    return out
