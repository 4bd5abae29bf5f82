"""Choose the records of one split, and draw a test split by content if nothing says which records are in it.

Shapes: N records.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from data_pipeline.core.errors import UserError
from data_pipeline.core.options import SOURCE_OPTION
from data_pipeline.core.progress import Progress
from data_pipeline.core.sample import BASE, Medium
from data_pipeline.core.schema import Schema
from data_pipeline.core.system import num_cores
from data_pipeline.sources import SourceInputs
from data_pipeline.sources.known_layouts import TEST, TRAIN
from data_pipeline.sources.layout import Layout, find_layout
from data_pipeline.sources.places import open_files

_NUM_AT_ONCE: Final = 1_000  # records that wait for the threads
# In the manifest, so that no build goes on with the split of another rule. Manifests of the first rule name none.
_SPLIT_RULE: Final = 3


class SplitOptions(Schema):
    """The options of a source of files, which say where splits and labels come from.

    test_share: the share of the records in the test split, which the seed of the build draws, if nothing names it.
    labels: a table of labels, in place of class folders: csv or .jsonl with a column `file`, and one for each label.
    class_from: the level of the folder that is the class, such as path:0, the first below train and test (the default),
        or path:-1, the one that holds the file.
    """

    test_share: float | None = Field(None, gt=0, lt=1, exclude=True)
    labels: Path | None = Field(None, exclude=True)
    class_from: str | None = Field(None, pattern=r"^path:-?\d+$", exclude=True)


class SplitFiles:
    """The files of one split, which a subclass reads, and their labels.

    Args:
        found: the records of the split.
        description: the kind of source, for the manifest.
    """

    def __init__(self, found: Layout, description: str) -> None:
        self.files, self.description = found.files, description
        self._names, self.num_records = found.names, len(found.names)
        self.labels = dict(sorted(found.labels.items(), key=lambda label: label[0] != BASE))


def open_split(given: SourceInputs, medium: Medium, options: SplitOptions) -> tuple[Layout, Layout]:
    """Return the records of all splits and those of the split of a build; log what was left out and assumed.

    Without labels, a split and a share, all records are for training. Raises the errors of `find_layout` and
    `draw_split`, and `UserError` if the split is empty, or if nothing says the splits.
    """
    if not given.shared:
        files = open_files(given.required_root())
        found = find_layout(files, medium, labels=options.labels, class_from=options.class_from)
        found.log_notes()
        share = options.test_share
        given.shared["layout"] = found if share is None else draw_split(found, test_share=share, seed=given.seed)
    layout: Layout = given.shared["layout"]
    root, split, chosen_N = layout.files.root, given.split, np.arange(len(layout.names))
    if layout.split_N is not None:
        chosen_N = np.flatnonzero(layout.split_N == split)
        if not len(chosen_N):
            raise UserError(f"{root} has no {medium} in the split {split}; add some, or choose the other --split")
    elif layout.labels or split == TEST:
        raise UserError(
            f"{root} has no folders train and test, nor a table with a column split, so both splits would "
            f"hold the same {medium}s; make these two folders, or give {SOURCE_OPTION} test_share=0.2 to both "
            "builds, which draws a test split"
        )
    labels = {name: replace(each, label_N=each.label_N[chosen_N]) for name, each in layout.labels.items()}
    names = [layout.names[number] for number in chosen_N.tolist()]
    return layout, replace(layout, names=names, split_N=None, labels=labels)


def draw_split(layout: Layout, *, test_share: float, seed: int) -> Layout:
    """Return a layout with a test split of the share `test_share`, and in words for the manifest how it was drawn.

    The draw is spread over the classes, or over the groups of equal labels, by `in_test_split` from the bytes of each
    file. Raises `UserError` if `layout` has splits, or if a split, or a class of a split, would be empty.
    """
    files, medium = layout.files, layout.medium
    if layout.split_N is not None:
        raise UserError(f"{files.root} says which {medium} is in which split, so it takes no test_share; leave it out")
    columns = [label.label_N for label in layout.labels.values()] or [np.zeros(len(layout.names), dtype=np.int64)]
    _, group_N = np.unique(np.stack(columns), axis=1, return_inverse=True)

    def digest(name: str) -> bytes:
        try:
            return hashlib.sha256(files.read(name)).digest()
        except (OSError, ValueError):  # the build names it when it reads it
            return os.fsencode(name)

    digests: list[bytes] = []
    with (
        ThreadPoolExecutor(num_cores()) as pool,
        Progress(f"splitting {files.root.name} into train and test", total=len(layout.names)) as progress,
    ):
        for start in range(0, len(layout.names), _NUM_AT_ONCE):
            digests += pool.map(digest, layout.names[start : start + _NUM_AT_ONCE])
            progress.advance(min(_NUM_AT_ONCE, len(layout.names) - start))
    in_test_N = in_test_split(
        digests, group_N.reshape(-1), test_share=test_share, seed=seed, carry_rounding=not layout.has_class_folders
    )
    for split, chosen_N in ((TEST, in_test_N), (TRAIN, ~in_test_N)):
        counts, of_class = np.array([np.count_nonzero(chosen_N)]), ""
        if layout.has_class_folders:
            counts = np.bincount(layout.labels[BASE].label_N[chosen_N], minlength=len(layout.labels[BASE].classes))
            of_class = f" of class {layout.labels[BASE].classes[int(counts.argmin())]}"
        if not counts.all():
            raise UserError(
                f"test_share={test_share} leaves no {medium}s{of_class} of {files.root} for the {split} split; choose "
                f"another share or add {medium}s"
            )
    num = f"{np.count_nonzero(in_test_N)} of {len(in_test_N)} {medium}s"
    drawn = f", test share {test_share} ({num}) by seed {seed} and rule {_SPLIT_RULE}"
    return replace(layout, split_N=np.where(in_test_N, TEST, TRAIN), drawn=drawn)


def in_test_split(
    digests: Sequence[bytes], labels: NDArray[np.int64], *, test_share: float, seed: int, carry_rounding: bool
) -> NDArray[np.bool_]:
    """Return whether each file is in the test split, (N,) bool.

    Draws the share `test_share` of the distinct files of each class, rounded. With `carry_rounding`, each class makes
    up for the rounding of the classes before it. Then the total is the rounded share of all distinct files, and the
    number of each class differs from its share by less than one.

    The draw depends on the digests and the seed alone, not on names or order. Copies of a file are in the same split; a
    file in two classes counts for the first. A change of the draw needs another `_SPLIT_RULE`.
    """
    class_of: dict[bytes, int] = {}
    for digest, label in zip(digests, labels.tolist(), strict=True):
        class_of[digest] = min(label, class_of.get(digest, label))
    in_class: dict[int, list[tuple[bytes, bytes]]] = {}
    for digest, label in class_of.items():
        lot = hashlib.sha256(f"test share {seed} ".encode() + digest).digest()
        in_class.setdefault(label, []).append((lot, digest))
    chosen: set[bytes] = set()
    share, start = Fraction(str(test_share)), 0
    for lots in sorted(map(sorted, in_class.values()), key=_lot_of_class):
        stop = start + len(lots)
        chosen.update(digest for _, digest in lots[: _rounded(share * stop) - _rounded(share * start)])
        start = stop if carry_rounding else 0
    return np.array([digest in chosen for digest in digests])


def _lot_of_class(lots: list[tuple[bytes, bytes]]) -> bytes:
    """Return a lot that depends on no name and favours no size: the hash of the sorted lots of a class."""
    return hashlib.sha256(b"".join(lot for lot, _ in lots)).digest()


def _rounded(number: Fraction) -> int:
    """Return the nearest whole number, the upper one of two."""
    return math.floor(number + Fraction(1, 2))
