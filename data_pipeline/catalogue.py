"""The datasets that can be built: a name is a family of pictures, and for most an overlay, as in `cifar10_digits`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from data_pipeline.errors import UserError, nearest
from data_pipeline.overlays import Overlay
from data_pipeline.overlays.digits import Digits
from data_pipeline.overlays.letters import Letters
from data_pipeline.overlays.shapes import Shapes
from data_pipeline.sources import Source
from data_pipeline.sources.cifar import Cifar10
from data_pipeline.sources.digits import DigitSource, mnist_digits, sklearn_digits
from data_pipeline.sources.folder import ImageFolder
from data_pipeline.sources.procedural import DEFAULT_NUM_PICTURES, Procedural

# The sources that each family can come from, the default first.
SOURCES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"cifar10": ("torchvision", "folder"), "procedural": ("procedural",)}
)
OVERLAYS: Final = ("shapes", "digits", "letters")
DATASETS: Final = tuple(
    family + suffix for family in SOURCES for suffix in ("", *(f"_{overlay}" for overlay in OVERLAYS))
)
SPLITS: Final = ("train", "test")
DIGITS: Final = ("mnist", "sklearn")


@dataclass(frozen=True)
class Ingredients:
    """What a dataset is made of; `description` is the manifest's `how_made.source`."""

    source: Source
    overlay: Overlay | None
    description: str


def open_dataset(
    dataset: str,
    *,
    source: str | None = None,
    root: Path | None = None,
    split: str = "train",
    seed: int = 0,
    limit: int | None = None,
    digits: str | None = None,
    digits_root: Path | None = None,
) -> Ingredients:
    """Open the source and the overlay of a dataset; what is `None` takes its default.

    `limit` is the number of pictures of the procedural source; other sources come whole. `digits` defaults to `sklearn`
    for procedural pictures and to `mnist` for others, and `digits_root` to `root`. Raises `UserError` where a name is
    unknown, an argument does not fit the dataset, or the data is missing.
    """
    if dataset not in DATASETS:
        raise UserError(f'unknown dataset "{dataset}"{nearest(dataset, DATASETS)}')
    if split not in SPLITS:
        raise UserError(f'unknown split "{split}"{nearest(split, SPLITS)}')
    family, _, overlay = dataset.partition("_")
    if overlay != "digits" and (digits is not None or digits_root is not None):
        raise UserError(f"{dataset} has no digits, so it takes no --digits or --digits-root; leave them out")
    opened = _open_source(family, source or SOURCES[family][0], root=root, split=split, seed=seed, limit=limit)
    match overlay:
        case "shapes":
            return Ingredients(opened, Shapes(), opened.description)
        case "letters":
            return Ingredients(opened, Letters(), opened.description)
        case "digits":
            kind = digits or ("sklearn" if family == "procedural" else "mnist")
            digit_source = _open_digits(kind, digits_root or root, split=split)
            description = f"{opened.description} + {digit_source.description}"
            return Ingredients(opened, Digits(digit_source), description)
    return Ingredients(opened, None, opened.description)


def _open_source(family: str, source: str, *, root: Path | None, split: str, seed: int, limit: int | None) -> Source:
    if source not in SOURCES[family]:
        raise UserError(f'{family} cannot come from the source "{source}"{nearest(source, SOURCES[family])}')
    if source == "procedural":
        if root is not None:
            raise UserError(f"procedural pictures are drawn, not read from {root}; leave --root out")
        return Procedural(seed=seed, split=split, num_pictures=limit or DEFAULT_NUM_PICTURES[split])
    if root is None:
        raise UserError(f"the source {source} reads pictures from a folder; name it with --root")
    return Cifar10(root, split=split) if source == "torchvision" else ImageFolder(root, split=split)


def _open_digits(kind: str, root: Path | None, *, split: str) -> DigitSource:
    if kind == "sklearn":
        return sklearn_digits(split=split)
    if kind != "mnist":
        raise UserError(f'unknown digits "{kind}"{nearest(kind, DIGITS)}')
    if root is None:
        raise UserError(
            "the digits of MNIST are read from a folder; name it with --digits-root, or choose --digits sklearn"
        )
    return mnist_digits(root, split=split)
