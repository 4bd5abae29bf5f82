"""Read pictures whose labels stand in a table: a csv file with a column `file` and a column for each label.

    file,split,sex,site,diagnosis
    a/0001.png,train,f,Bonn,none
    a/0002.png,test,m,Kiel,

An empty cell means that the picture does not have this label. The label `base` must not be empty.
"""

from __future__ import annotations

import csv
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Annotated, ClassVar, Final

import numpy as np
from pydantic import BeforeValidator, Field

from data_pipeline.core.errors import UserError
from data_pipeline.core.label_words import as_word, choose_classes
from data_pipeline.core.sample import BASE, OVERLAY
from data_pipeline.core.schema import ImageSize, Schema, check_label_name
from data_pipeline.core.value_range import ValueRange
from data_pipeline.sources import LabelColumn, SourceInputs
from data_pipeline.sources.files import Directory, Names
from data_pipeline.sources.folder import PictureFiles, image_folder, open_pictures
from data_pipeline.sources.layout import Layout

logger = logging.getLogger(__name__)

FILE_COLUMN: Final = "file"
SPLIT_COLUMN: Final = "split"
_SPLITS: Final = ("train", "test")
_NUM_NAMED: Final = 10  # splits in a message


class FolderOptions(Schema):
    """The options of the source folder. They stand in the description of the source.

    image_size: width and height in pixels to which each picture is brought; by default, all must have one size.
    test_share: the share of the pictures in the test split, which the seed of the build draws, if the folder has none.
    labels: a csv file with a column `file` and one for each label, in place of class folders.
    class_from: the level of the folder that is the class, such as path:0, the first below train and test (the default),
        or path:-1, the one that holds the file.
    value_range: the values of files of more than 8 bits that become 0 and 255, such as 0..4095.
    """

    image_size: ImageSize | None = Field(None, exclude=True)
    test_share: float | None = Field(None, gt=0, lt=1, exclude=True)
    labels: Path | None = Field(None, exclude=True)
    class_from: str | None = Field(None, pattern=r"^path:-?\d+$", exclude=True)
    value_range: Annotated[str, BeforeValidator(lambda given: str(ValueRange.parse(given)))] | None = None


class Folder:
    """The source folder: pictures in class folders, or with the labels of a table."""

    needs_root: ClassVar[bool] = True
    options_schema: ClassVar[type[Schema]] = FolderOptions

    @classmethod
    def open(cls, given: SourceInputs) -> PictureFiles:
        options, root = given.read(FolderOptions), given.required_root()
        size, share = options.image_size, options.test_share
        value_range = None if options.value_range is None else ValueRange.parse(options.value_range)
        if options.labels is None:
            return image_folder(
                root,
                split=given.split,
                image_size=size,
                test_share=share,
                seed=given.seed,
                class_from=options.class_from,
                value_range=value_range,
            )
        return picture_table(
            root,
            options.labels,
            split=given.split,
            image_size=size,
            test_share=share,
            seed=given.seed,
            value_range=value_range,
        )


def picture_table(
    root: Path,
    table: Path,
    *,
    split: str,
    image_size: int | None = None,
    test_share: float | None = None,
    seed: int = 0,
    value_range: ValueRange | None = None,
) -> PictureFiles:
    """Return the pictures of one split, in the order of their names, with the labels that a table gives them.

    `file` is relative to `root` and has no "..". The column `split`, if there is one, names the split of each picture.
    Without it, a picture in the folder `train` or `test` of `root` is in that split; without these, `draw_split` draws
    the share `test_share` of all pictures, spread over the groups of equal labels. Each split has all classes of a
    label, also those that only the other split shows.

    Raises `UserError` if the table or a picture is missing, or if a column or a cell is wrong.
    """
    layout = _layout_of_table(root, table)
    return open_pictures(
        layout, split=split, image_size=image_size, value_range=value_range, test_share=test_share, seed=seed
    )


def _layout_of_table(root: Path, table: Path) -> Layout:
    columns = _read_table(table)
    names = [_below_root(name, root, table) for name in columns.pop(FILE_COLUMN)]
    splits = columns.pop(SPLIT_COLUMN, None)
    _check_files(names, root, table)
    labels = {label: _label(label, cells, names, table) for label, cells in columns.items()}
    if splits is None and any((root / name).is_dir() for name in _SPLITS):
        splits = [str(PurePath(name).parent).partition("/")[0] for name in names]
    splits = splits and [name.lower() for name in splits]
    notes: dict[str, list[str]] = {}
    rows = sorted(range(len(names)), key=lambda row: names[row])
    if splits is not None:
        if others := Counter(splits[row] for row in rows if splits[row] not in _SPLITS):
            counts = ", ".join(f'{num} in "{name}"' for name, num in others.most_common(_NUM_NAMED))
            outside = [names[row] for row in rows if splits[row] not in _SPLITS]
            notes[f"left out pictures that are in neither split: {counts}"] = outside
        rows = [row for row in rows if splits[row] in _SPLITS]
    return Layout(
        files=Directory(root),
        kind="folder with a table of labels",
        medium="picture",
        names=Names(names[row] for row in rows),
        split_N=None if splits is None else np.array([splits[row] for row in rows]),
        labels={name: LabelColumn(name, label.classes, label.label_N[rows]) for name, label in labels.items()},
        notes=notes,
    )


def _below_root(name: str, root: Path, table: Path) -> str:
    """Return the path of a picture relative to `root`, without "." and "//", so that each file has one name.

    Raises `UserError` if the path has ".." or is outside of `root`. Behind a link, only the file system knows what ".."
    is.
    """
    path = PurePath(name)
    if path.is_absolute() and path.is_relative_to(top := root.absolute()):
        path = path.relative_to(top)
    if path.is_absolute() or ".." in path.parts:
        raise UserError(
            f"{table} names {name}, which is not a path below {root}; write it without .., relative to --root"
        )
    return str(path)


def _check_files(names: Sequence[str], root: Path, table: Path) -> None:
    """Raise `UserError` if a picture is named twice or does not exist."""
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; give --root the folder to which {table} refers")
    name, num = Counter(names).most_common(1)[0]
    if num > 1:
        raise UserError(f"{table} names {name} {num} times; give each picture one line")
    if missing := [name for name in names if not (root / name).is_file()]:
        raise UserError(
            f"{table} names {len(missing)} files that are not in {root}, such as {missing[0]}; give --root the folder "
            "to which they are relative"
        )


def _label(label: str, cells: Sequence[str], names: Sequence[str], table: Path) -> LabelColumn:
    """Return one label of all pictures of the table."""
    words = [as_word(cell) for cell in cells]
    if not any(words):
        raise UserError(f"{table} has no value in the column {label}; fill it, or remove the column")
    if label == BASE and not all(words):
        raise UserError(
            f"{table} gives {names[words.index('')]} no value in the column {BASE}, which every picture needs; fill "
            "it, or give the column another name"
        )
    classes = choose_classes(label, set(words))
    if classes.remark:
        logger.warning("%s: %s", table, classes.remark)
    label_N = np.array([classes.number_of[word] for word in words], dtype=np.int64)
    return LabelColumn(label, classes.names, label_N)


def _read_table(path: Path) -> dict[str, list[str]]:
    """Return the columns of a csv file by name, with the spaces around each cell removed.

    Raises `UserError` if the file is missing, has no column `file` or no label, or if a name of a column or the length
    of a line is wrong.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            # With the number in the file, because empty lines are left out and a cell may hold several lines.
            lines = [(reader.line_num, [cell.strip() for cell in line]) for line in reader if any(line)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as a csv file ({error}); save it in UTF-8, or name another") from None
    if len(lines) < 2:
        raise UserError(f"{path} holds no line of a picture; write a header with {FILE_COLUMN}, and a line for each")
    (_, head), *rows = lines
    if FILE_COLUMN not in head:
        raise UserError(f"{path} has no column {FILE_COLUMN}, only {', '.join(head)[:200]}; name that of the files so")
    for name, num in Counter(head).items():
        if num > 1:
            raise UserError(f"{path} has {num} columns {name}; give each another name")
        if name in (FILE_COLUMN, SPLIT_COLUMN):
            continue
        try:
            check_label_name(name)
        except ValueError as error:
            raise UserError(f"{path}: the column {error}") from None
        if name == OVERLAY:
            raise UserError(f"{path} has a column {OVERLAY}, the label of what a build draws; give it another name")
    if not set(head) - {FILE_COLUMN, SPLIT_COLUMN}:
        raise UserError(f"{path} has no column of a label, only {', '.join(head)}; add one, such as {BASE}")
    for number, row in rows:
        if len(row) != len(head):
            raise UserError(f"line {number} of {path} has {len(row)} cells, but its header has {len(head)}; mend it")
    return {name: [row[column] for _, row in rows] for column, name in enumerate(head)}
