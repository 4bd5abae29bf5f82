"""Build the data of the suppression benchmark: every setting in every difficulty.

    python -m data_pipeline suppression --root DIR --out data/suppression_small --small

leaves out the datasets that are finished. `--root` holds what torchvision downloads (CIFAR-10, MNIST) and the
recordings of spoken digits. A setting whose files are missing is named at the end, and the others are built.

A correlation of two labels holds in the train split. In the test split, labels are independent, so that every pair of
classes has samples.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal

from data_pipeline.building.build import build_dataset
from data_pipeline.building.datasets import SPLITS
from data_pipeline.building.suppression_settings import NUM_SMALL, SETTINGS, Scale, Setting, directory_of
from data_pipeline.core.errors import UserError, nearest
from data_pipeline.core.options import Options
from data_pipeline.overlays import NOTHING_GIVEN
from data_pipeline.overlays.digits import DigitOptions
from data_pipeline.overlays.registry import find_overlay

_NUM_SMALL_SOUNDS: Final[Mapping[str, int]] = {"train": 1_000, "test": 500}
_NUM_FULL_TRIFEATURE: Final[Mapping[str, int]] = {"train": 80_000, "test": 20_000}


@dataclass(frozen=True)
class Files:
    """The places of the files of the sources, and their kinds.

    Attributes:
        root: holds what torchvision downloads for CIFAR-10 and MNIST; or `train` and `test` with a folder for each
            class, in place of CIFAR-10, if `cifar` is "folder".
        digits: the digits of MNIST in each split, see `data_pipeline.sources.digits`.
        speech, noise: the recordings of spoken digits and the background sounds; None for `root`.
    """

    root: Path
    cifar: Literal["torchvision", "folder"] = "torchvision"
    digits: str = "mnist_test_for_test"
    speech: Path | None = None
    noise: Path | None = None


@dataclass(frozen=True)
class Part:
    """A split of a dataset to build, and what a message calls it.

    Attributes:
        arguments: those of `build_dataset`, without directory, split and number of workers.
    """

    title: str
    directory: Path
    split: str
    arguments: Mapping[str, Any]


def files_of(arguments: argparse.Namespace) -> Files:
    """Return the places of the files that a command line names."""
    return Files(**{field.name: getattr(arguments, field.name) for field in fields(Files)})


def build_parts(parts: Sequence[Part], *, limit: int | None, num_workers: int) -> list[str]:
    """Build every part, and return a sentence for each title of which a part could not be built.

    After such a part, others of its title are left out. `limit` bounds the samples of a part further.
    """
    problems: dict[str, str] = {}
    for part in parts:
        if part.title in problems:
            continue
        at_most = min((most for most in (part.arguments["limit"], limit) if most is not None), default=None)
        try:
            build_dataset(
                directory=part.directory,
                split=part.split,
                num_workers=num_workers,
                **{**part.arguments, "limit": at_most},
            )
        except UserError as error:
            problems[part.title] = f"{part.title} was not built: {error}"
    return list(problems.values())


def arguments_of(
    base: str,
    overlay: str | None,
    *,
    scale: Scale,
    files: Files,
    source_options: Options = NOTHING_GIVEN,
    overlay_options: Options = NOTHING_GIVEN,
) -> dict[str, Any]:
    """Return the arguments of `build_dataset` for pictures or sounds and an overlay on them: source, root, options."""
    of_source, of_overlay = dict(source_options), dict(overlay_options)
    if base in ("spoken", "silence"):
        if overlay is not None:
            of_overlay["noise_root"] = str(files.noise or files.root)
        source = "fsdd" if scale == "small" else "audiomnist"
        return {"source": source, "root": files.speech or files.root, "overlay_options": of_overlay}
    if base == "trifeature":
        return {"source_options": of_source}
    is_photo = base.startswith("cifar")
    if not is_photo:
        of_source["kind"] = files.digits
    if overlay is not None and issubclass(find_overlay(overlay).options_schema, DigitOptions):
        of_overlay["digits"] = files.digits
    photos = files.cifar if is_photo else None
    return {"source": photos, "root": files.root, "source_options": of_source, "overlay_options": of_overlay}


def build_suppression(
    out: Path,
    *,
    names: Sequence[str],
    scale: Scale,
    files: Files,
    limit: int | None = None,
    num_workers: int = 1,
) -> list[str]:
    """Build the settings `names` in `out`, and return a sentence for each that could not be built.

    A dataset that is there is checked, not built again. `limit` bounds the samples of a split further.
    """
    parts = [
        Part(
            setting.title,
            Path(directory_of(str(out), name, difficulty, split)),
            split,
            {
                "dataset": setting.dataset,
                "overlay": None if setting.overlay is None else "online",
                "limit": _limit(setting, split=split, scale=scale),
                **arguments_of(
                    setting.base,
                    setting.overlay,
                    scale=scale,
                    files=files,
                    source_options=setting.options("source", difficulty=difficulty, split=split, scale=scale),
                    overlay_options=setting.options("overlay", difficulty=difficulty, split=split, scale=scale),
                ),
            },
        )
        for name in names
        for setting in (SETTINGS[name],)
        for difficulty in setting.names_of_difficulties(scale)
        for split in SPLITS
    ]
    return build_parts(parts, limit=limit, num_workers=num_workers)


def _limit(setting: Setting, *, split: str, scale: Scale) -> int | None:
    if scale == "small":
        return (_NUM_SMALL_SOUNDS if setting.is_sound else NUM_SMALL)[split]
    return _NUM_FULL_TRIFEATURE[split] if setting.overlay is None else None


def run(arguments: argparse.Namespace) -> None:
    """Carry out `python -m data_pipeline suppression`. Raises `UserError` if a setting could not be built."""
    names = list(SETTINGS) if arguments.settings is None else arguments.settings.split(",")
    for name in names:
        if name not in SETTINGS:
            raise UserError(f'unknown setting "{name}"{nearest(name, SETTINGS)}')
    problems = build_suppression(
        arguments.out,
        names=names,
        scale="small" if arguments.small else "full",
        files=files_of(arguments),
        limit=arguments.limit,
        num_workers=arguments.workers,
    )
    if problems:
        raise UserError("; ".join(problems))
    print(f"{arguments.out} holds {', '.join(names)}")
