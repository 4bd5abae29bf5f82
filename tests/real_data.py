"""Where tests find the real CIFAR-10 and MNIST: `$OVERLAY_DATA`, else `../shared/data` beside the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def archive(name: str) -> Path:
    """The path of one archive or folder; skips the test, saying why, where the data is not at hand."""
    root = Path(os.environ.get("OVERLAY_DATA", REPOSITORY.parent / "shared" / "data"))
    path = root / name
    if not path.exists():
        pytest.skip(f"needs the real data {name}: not in {root}; set OVERLAY_DATA to the folder that holds it")
    return path
