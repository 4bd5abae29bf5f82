"""Choose the records of one split, and draw a test split by content if nothing says which records are in it.

Shapes: N records.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from data_pipeline.core.errors import UserError
from data_pipeline.core.options import SOURCE_OPTION
from data_pipeline.core.progress import Progress
from data_pipeline.core.sample import Medium
from data_pipeline.core.schema import Schema
from data_pipeline.core.system import num_cores
from data_pipeline.sources import LabelColumn, SourceInputs
from data_pipeline.sources.files import Files, Names
from data_pipeline.sources.known_layouts import TEST, TRAIN
from data_pipeline.sources.layout import Layout, find_layout
from data_pipeline.sources.places import open_files
from data_pipeline.storage.source_digests import content_digest

_NUM_AT_ONCE: Final = 1_000  # records that wait for the threads
# In the manifest, so that no build goes on with the split of another rule. Manifests of the first rule name none.
_SPLIT_RULE: Final = 2


class SplitOptions(Schema):
    """The options of a source of files, which say where splits and labels come from.

    test_share: the share of the records in the test split, which the seed of the build draws, if nothing names it.
    labels: a table of labels, in place of class folders: csv or .jsonl with a column `file`, and one for each label.
    class_from: the level of the folder that is the class, such as path:0, the first below train and test (the default),
        or path:-1, the one that holds the file.
    test_fold: of ESC-50, the fold that is the test split.
    """

    test_share: float | None = Field(None, gt=0, lt=1, exclude=True)
    labels: Path | None = Field(None, exclude=True)
    class_from: str | None = Field(None, pattern=r"^path:-?\d+$", exclude=True)
    test_fold: int = Field(5, ge=1, exclude=True)


@dataclass(frozen=True)
class Split:
    """The records of one split: their names in `files`, their labels, and in words the layout and what was drawn.

    `all_names` are those of all splits.
    """

    files: Files
    all_names: Names
    names: Names
    labels: Mapping[str, LabelColumn]
    kind: str
    drawn: str


def open_split(
    given: SourceInputs, medium: Medium, options: SplitOptions, decode: Callable[[bytes], NDArray[Any]]
) -> Split:
    """Return the records of the split of a build, and log what was left out and assumed.

    `decode` reads a file; it is called only if the split is drawn. Raises the errors of `find_layout` and `records_of`.
    """
    if not given.shared:
        found = find_layout(
            open_files(given.required_root()),
            medium,
            labels=options.labels,
            class_from=options.class_from,
            test_fold=options.test_fold,
        )
        found.log_notes()
        given.shared.update(layout=found, digests=[])
    layout: Layout = given.shared["layout"]
    chosen_N, drawn = records_of(
        layout,
        given.split,
        lambda name: layout.files.decoded(name, decode),
        test_share=options.test_share,
        seed=given.seed,
        digests=given.shared["digests"],
    )
    return Split(
        layout.files,
        layout.names,
        Names(layout.names[number] for number in chosen_N.tolist()),
        {name: LabelColumn(each.title, each.classes, each.label_N[chosen_N]) for name, each in layout.labels.items()},
        layout.kind,
        drawn,
    )


def records_of(
    layout: Layout,
    split: str,
    content_of: Callable[[str], NDArray[Any]],
    *,
    test_share: float | None = None,
    seed: int = 0,
    digests: list[bytes],
) -> tuple[NDArray[np.int64], str]:
    """Return the numbers of the records of a split, sorted, and in words for the manifest how they were drawn.

    Nothing is drawn, and the words are empty, if `layout` says which records are in which split. Otherwise the share
    `test_share` of the records is the test split, spread over the classes, or over the groups of equal labels. It is
    drawn by `in_test_split` from `content_of`, the decoded content of each record, which threads read. Records that
    cannot be read are in both splits, so that both builds name them. Without labels and without a share, all records
    are for training. `digests` are those of the contents if another split was drawn before; else it is filled.

    Raises `UserError` if `test_share` is missing or not needed, or if a split, or a class of a split, is empty.
    """
    root, medium = layout.files.root, layout.medium
    if layout.split_N is not None:
        if test_share is not None:
            raise UserError(f"{root} says which {medium} is in which split, so it takes no test_share; leave it out")
        if split not in layout.split_N:
            raise UserError(f"{root} has no {medium} in the split {split}; add some, or choose the other --split")
        return np.flatnonzero(layout.split_N == split), ""
    if test_share is None:
        if split == TRAIN and not layout.labels:
            return np.arange(len(layout.names)), ""
        raise UserError(
            f"{root} has no folders train and test, nor a table with a column split, so both splits would "
            f"hold the same {medium}s; make these two folders, or give {SOURCE_OPTION} test_share=0.2 to both "
            "builds, which draws a test split"
        )
    columns = [label.label_N for label in layout.labels.values()] or [np.zeros(len(layout.names), dtype=np.int64)]
    _, group_N = np.unique(np.stack(columns), axis=1, return_inverse=True)

    def digest(name: str) -> bytes:
        try:
            return content_digest(content_of(name))
        except UserError:  # the build of each split names it
            return b""

    with (
        ThreadPoolExecutor(num_cores()) as pool,
        Progress(f"splitting {root.name} into train and test", total=len(layout.names)) as progress,
    ):
        for start in range(len(digests), len(layout.names), _NUM_AT_ONCE):
            some = layout.names[start : start + _NUM_AT_ONCE]
            digests += pool.map(digest, some)
            progress.advance(len(some))
    is_read_N = np.array([bool(each) for each in digests])
    in_test_N = np.zeros(len(digests), dtype=bool)
    in_test_N[is_read_N] = in_test_split(
        list(filter(None, digests)),
        group_N.reshape(-1)[is_read_N],
        test_share=test_share,
        seed=seed,
        carry_rounding=not layout.has_class_folders,
    )
    chosen = np.flatnonzero((in_test_N == (split == TEST)) | ~is_read_N)
    if not len(chosen):
        raise UserError(f"test_share={test_share} leaves no {medium}s of {root} for the {split} split; choose another")
    for label in layout.labels.values() if layout.has_class_folders else ():
        counts = np.bincount(label.label_N[chosen], minlength=len(label.classes))
        if not counts.all():
            raise UserError(
                f"test_share={test_share} leaves no {medium}s of class {label.classes[int(counts.argmin())]} of {root} "
                f"for the {split} split; choose another share or add {medium}s"
            )
    num = f"{np.count_nonzero(in_test_N)} of {np.count_nonzero(is_read_N)} {medium}s"
    return chosen, f", test share {test_share} ({num}) by seed {seed} and rule {_SPLIT_RULE}"


def in_test_split(
    digests: Sequence[bytes], labels: NDArray[np.int64], *, test_share: float, seed: int, carry_rounding: bool
) -> NDArray[np.bool_]:
    """Return whether each picture is in the test split, (N,) bool.

    Draws the share `test_share` of the distinct pictures of each class, rounded. With `carry_rounding`, each class
    makes up for the rounding of the classes before it. Then the total is the rounded share of all distinct pictures,
    and the number of each class differs from its share by less than one.

    The draw depends on the pictures and the seed alone, not on names or order. Copies of a picture are in the same
    split; a picture in two classes counts for the first. A change of the draw needs another `_SPLIT_RULE`.
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
