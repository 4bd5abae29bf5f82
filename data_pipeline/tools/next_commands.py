"""Choose the commands that build what was found, and train on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from data_pipeline.core.options import SOURCE_OPTION
from data_pipeline.core.sample import Medium
from data_pipeline.sources.known_layouts import TEST, TRAIN
from data_pipeline.sources.layout import Layout
from data_pipeline.tools.findings import Place

TEST_SHARE: Final = 0.2
_DATA: Final = ("python", "-m", "data_pipeline")
_SIZE: Final = 32  # pixels, to which pictures are brought: a CPU trains on them in minutes
_BATCH: Final = 64  # samples, of the recipes for a CPU
_DATASETS: Final[dict[Medium, str]] = {"picture": "folder", "sound": "sounds"}
_RECIPES: Final[dict[Medium, str]] = {"picture": "simclr:folder_small", "sound": "audio:folder_small"}


def commands(places: Sequence[Place]) -> list[list[str]]:
    """Return the words of each command; none for a place in which something has to be mended first."""
    found: list[list[str]] = []
    for place in places:
        if any(problem.stops for problem in place.problems):
            continue
        if place.manifest is not None:
            found += [[*_DATA, "verify", place.path], [*_DATA, "preview", place.path, "--out", "grid.png"]]
        elif place.files is not None and place.layout is not None:
            found += _of_files(place, place.files.root, place.layout)
    return found


def _of_files(place: Place, root: Path, layout: Layout) -> list[list[str]]:
    is_good, num_train = place.is_good, int((1 - TEST_SHARE) * np.count_nonzero(place.is_good))
    options: dict[str, object] = {}
    if layout.medium == "picture":
        options = {"image_size": _SIZE}
    if place.labels is not None:
        options["labels"] = place.labels
    if layout.split_N is None:
        options["test_share"] = TEST_SHARE if place.num_least > 2 else 0.5  # leaves each class folder a file
    else:
        num_train = int(np.count_nonzero(is_good & (layout.split_N == TRAIN)))
    build = [*_DATA, "build", _DATASETS[layout.medium], "--root", str(root)]
    build += [word for option, value in options.items() for word in (SOURCE_OPTION, f"{option}={value}")]
    out = f"data/{root.absolute().name.split('.')[0] or 'mine'}"
    if num_bad := np.count_nonzero(~is_good):
        build += ["--skip-bad", str(num_bad)]
    build += ["--split", "both", "--out", out]
    return [build, _train(layout.medium, f"{out}/{TRAIN}", f"{out}/{TEST}", num_train)]


def _train(medium: Medium, train: str, test: str, num_samples: int) -> list[str]:
    settings = [f"data.train_dir={train}", f"data.test_dir={test}"]
    if num_samples < _BATCH:
        settings.append(f"global_batch_size={max(2, (1 << num_samples.bit_length()) // 2)}")
    words = ["python", "launch/train.py", "--config", _RECIPES[medium]]
    return words + [word for setting in settings for word in ("--set", setting)]
