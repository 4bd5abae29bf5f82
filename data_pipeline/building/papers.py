"""Build the data of the papers' tables, in the directories where recipes and studies read it.

    python -m data_pipeline papers --root DIR --out data            # the published sizes
    python -m data_pipeline papers --root DIR --out data --small    # data/small, for the studies ..._small

leaves out the datasets that are finished. `--root` holds what torchvision downloads (CIFAR-10, CIFAR-100, MNIST), the
recordings of spoken digits (AudioMNIST; FSDD if small) and the background sounds. A dataset whose files are missing is
named at the end, with the address of the files, and the others are built.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from data_pipeline.building.datasets import DATASETS, SPLITS
from data_pipeline.building.suppression import Files, Part, arguments_of, build_parts, files_of
from data_pipeline.building.suppression_settings import NUM_SMALL
from data_pipeline.core.errors import UserError

PICTURES: Final = ("cifar10", "cifar10_shapes", "cifar10_digits", "cifar10_letters")
PUBLISHED: Final = (*PICTURES, "cifar100", "spoken", "noise", "spoken_noise")
SMALL: Final = (*PICTURES, "spoken", "noise", "spoken_noise")


def parts_of_papers(out: Path, *, small: bool, files: Files) -> list[Part]:
    """Return the splits to build, in `out/NAME/SPLIT`, or in `out/small/NAME/SPLIT` if `small`."""
    home = out / "small" if small else out
    return [
        Part(name, home / name / split, split, _arguments(name, split=split, small=small, files=files))
        for name in (SMALL if small else PUBLISHED)
        for split in SPLITS
    ]


def _arguments(name: str, *, split: str, small: bool, files: Files) -> dict[str, Any]:
    dataset = DATASETS[name]
    num_small = NUM_SMALL[split] if dataset.base.startswith("cifar") else 1_000
    return {
        "dataset": name,
        "overlay": None if dataset.overlay is None else "online",
        "limit": num_small if small else None,
        **arguments_of(dataset.base, dataset.overlay, scale="small" if small else "full", files=files),
    }


def run(arguments: argparse.Namespace) -> None:
    """Carry out `python -m data_pipeline papers`. Raises `UserError` if a dataset could not be built."""
    parts = parts_of_papers(arguments.out, small=arguments.small, files=files_of(arguments))
    if problems := build_parts(parts, limit=arguments.limit, num_workers=arguments.workers):
        raise UserError("; ".join(problems))
    print(f"{arguments.out} holds {', '.join(dict.fromkeys(part.title for part in parts))}")
