"""Choose the commands that fit what was found at a path: they build or index it, look at it and train on it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from data_pipeline.core.options import SOURCE_OPTION
from data_pipeline.core.sample import Medium
from data_pipeline.core.value_range import VALUE_RANGE, ValueRange
from data_pipeline.sources.known_layouts import TEST, TRAIN
from data_pipeline.sources.layout import Layout
from data_pipeline.sources.tar_files import TAR
from data_pipeline.storage.locations import is_remote
from data_pipeline.tools.census import Census
from data_pipeline.tools.findings import Place

TEST_SHARE: Final = 0.2
_DATA: Final = ("python", "-m", "data_pipeline")
_SIZES: Final = (32, 64)  # pixels, to which pictures are brought: a CPU can train on them
_MOST_BITS: Final = 14  # of 16, below which pictures would be nearly black
_BATCH: Final = 64  # samples, of the recipes for a CPU
_RECIPES: Final[dict[Medium, str]] = {"picture": "simclr:folder_small", "sound": "audio:folder_small"}
_DATASETS: Final[dict[Medium, str]] = {"picture": "folder", "sound": "sounds"}


def commands(place: Place) -> list[list[str]]:
    """Return the words of each command; none if something has to be mended first, or if another place has them."""
    if any(problem.stops for problem in place.problems):
        return []
    if (manifest := place.manifest) is not None:
        tools = [[*_DATA, tool, place.path] for tool in ("verify", "preview")]
        tools[1] += ["--out", "grid.png"]
        train = place.path if manifest.how_made.split == TRAIN else "TRAIN_DIR"
        test = place.path if manifest.how_made.split == TEST else "TEST_DIR"
        return [*tools, _train(manifest.medium, train, test, manifest.num_samples)]
    if len(place.tars) > 1 or any(is_remote(tars.location) for tars in place.tars):
        return _of_tars(place)
    if place.layout is None or place.files is None:
        return []
    return _of_files(place, place.files.root, place.layout)


def _of_tars(place: Place) -> list[list[str]]:
    """Return the commands that index tars; the indexes behind the first take the classes and settings of the first."""
    directories: list[str] = []
    found: list[list[str]] = []
    for tars in place.tars:
        words = [*_DATA, "index", tars.location]
        directories.append(tars.location)
        if is_remote(tars.location):
            directories[-1] = "data/" + re.sub(
                r"[^A-Za-z0-9]+", "-", tars.location.rpartition("/")[2].removesuffix(TAR)
            )
            words += ["--out", directories[-1]]
        if found:
            words += ["--classes-of", directories[0]]
        else:
            words += ["--size", str(_image_size(place.census))]
            words += ["--key", tars.key] if tars.key != "first-dot" else []
            words += ["--label", tars.label] if tars.label is not None else []
            words += [f"--value-range={value}" for value in _value_range(place.census.limits).values()]
        found.append(words if place.is_good.all() else [*words, "--skip-bad", str(np.count_nonzero(~place.is_good))])
    return found if len(found) == 1 else [*found, _train("picture", directories[0], directories[1], len(place.is_good))]


def _of_files(place: Place, root: Path, layout: Layout) -> list[list[str]]:
    is_good, num_train = place.is_good, int((1 - TEST_SHARE) * np.count_nonzero(place.is_good))
    options: dict[str, object] = {}
    if layout.medium == "picture":
        options["image_size"] = _image_size(place.census)
        options |= _value_range(place.census.limits)
    if place.labels is not None:
        options["labels"] = place.labels
    splits = [TRAIN, TEST]
    if layout.split_N is None:
        options["test_share"] = _test_share(place, layout)
    else:
        splits = [split for split in splits if split in layout.split_N]
        num_train = int(np.count_nonzero(is_good & (layout.split_N == TRAIN)))
    build = [*_DATA, "build", _DATASETS[layout.medium], "--root", str(root)]
    build += [word for option, value in options.items() for word in (SOURCE_OPTION, f"{option}={value}")]
    build += [] if is_good.all() else ["--skip-bad", str(np.count_nonzero(~is_good))]
    out = f"data/{root.absolute().name.split('.')[0] or 'mine'}"
    builds = [[*build, "--split", split, "--out", f"{out}/{split}"] for split in splits]
    return [*builds, _train(layout.medium, f"{out}/{TRAIN}", f"{out}/{splits[-1]}", num_train)]


def _test_share(place: Place, layout: Layout) -> float:
    """Return a share that leaves a test file of each class folder, as far as the smallest class allows that."""
    if not layout.has_class_folders:
        return TEST_SHARE
    (label,) = layout.labels.values()
    return TEST_SHARE if np.bincount(label.label_N[place.is_good]).min() > 2 else 0.5


def _image_size(census: Census) -> int:
    """Return the size for a CPU that at least half of the pictures have on their shorter side."""
    sides: Counter[int] = Counter()
    for size, num in census.sizes.items():
        sides[min(size)] += num
    middle = np.repeat(sorted(sides), [sides[side] for side in sorted(sides)])[sides.total() // 2]
    return max([size for size in _SIZES if size <= middle], default=_SIZES[0])


def _value_range(limits: Mapping[str, tuple[float, float]]) -> dict[str, object]:
    """Return the range of the values of pictures of more than 8 bits, if their files name none or use a part of it."""
    unscaled = [of_mode for mode, of_mode in limits.items() if not mode.startswith("I;16")]
    if unscaled:
        low, high = min(low for low, _ in unscaled), max(high for _, high in unscaled)
        return {VALUE_RANGE: str(ValueRange(low, high if high > low else low + 1))}
    num_bits = max((int(high).bit_length() for _, high in limits.values()), default=16)
    return {} if num_bits > _MOST_BITS else {VALUE_RANGE: 2 ** max(num_bits, 8) - 1}


def _train(medium: Medium, train: str, test: str, num_samples: int) -> list[str]:
    settings = [f"data.train_dir={train}", f"data.test_dir={test}"]
    if num_samples < _BATCH:
        settings.append(f"global_batch_size={max(2, (1 << num_samples.bit_length()) // 2)}")
    words = ["python", "-m", "launch.train", "--config", _RECIPES[medium]]
    return words + [word for setting in settings for word in ("--set", setting)]
