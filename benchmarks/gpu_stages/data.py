"""Build the datasets that a session reads, unless they are there: with the commands that a user would type."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.gpu_stages.session import Setting
from data_pipeline.core.errors import UserError

ROOT = Path(__file__).parents[2]
PLAIN: Final = "cifar10"  # without an overlay
_NUM_PROCEDURAL: Final = 20_000  # pictures for throughput, whose content does not matter


def pictures_without_overlay(setting: Setting) -> Path:
    """Return the directory of procedural pictures of 32 x 32 on which the digits are stored, and build it if needed."""
    limit = 64 if setting.is_tiny else _NUM_PROCEDURAL
    return _built(setting, "procedural_digits", "train", "--limit", str(limit))


def procedural_pair(setting: Setting, overlay: str) -> tuple[Path, Path]:
    """Return a small train set and test set of procedural pictures, drawn on online; build them if needed."""
    return _pair(
        setting, f"procedural_{overlay}", "--overlay", "online", "--limit", "64" if setting.is_tiny else "4096"
    )


def published(setting: Setting, overlay: str) -> tuple[Path, Path]:
    """Return the train set and the test set of CIFAR-10 with an overlay that is drawn online; build them if needed.

    `overlay` is "cifar10" for the pictures alone. The pictures of a dry run are procedural, and have an overlay. Raises
    `UserError` if they have to be built and `root` is not given.
    """
    if setting.is_tiny:
        return procedural_pair(setting, "digits" if overlay == PLAIN else overlay)
    options = [] if overlay == PLAIN else ["--overlay", "online"]
    if setting.root is not None:
        is_folder = (setting.root / "train").is_dir()
        options += ["--source", "folder" if is_folder else "torchvision", "--root", str(setting.root)]
        if overlay == "digits":
            options += ["--digits-root", str(setting.root), "--digits", setting.digits]
    return _pair(setting, PLAIN if overlay == PLAIN else f"cifar10_{overlay}", *options)


def _pair(setting: Setting, dataset: str, *options: str) -> tuple[Path, Path]:
    train, test = (_built(setting, dataset, split, *options, name=f"{dataset}_online") for split in ("train", "test"))
    return train, test


def _built(setting: Setting, dataset: str, split: str, *options: str, name: str | None = None) -> Path:
    # A recipe's own place, data/DATASET/SPLIT, first: it may have been built by hand.
    places = [setting.data / dataset / split] if name is not None else []
    out = setting.data / (name or f"{dataset}_stored") / split
    for place in (out, *places):
        if (place / "manifest.json").is_file():
            return place
    if dataset.startswith("cifar10") and setting.root is None:
        raise UserError(
            f"{out} is not built, and nothing says where its pictures are; pass --root DIR with CIFAR-10 and MNIST/raw"
        )
    command = [sys.executable, "-m", "data_pipeline", "build", dataset, "--split", split, "--out", str(out)]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, encoding="utf-8")
    if done.returncode != 0:
        raise UserError(f"{dataset} could not be built: {done.stderr.strip()[-300:]}")
    return out
