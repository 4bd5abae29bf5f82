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
from pathlib import Path, PurePath
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from data_pipeline.core.errors import UserError
from data_pipeline.core.options import SOURCE_OPTION
from data_pipeline.core.sample import BASE, NO_LABEL, OVERLAY, Record
from data_pipeline.core.schema import ImageSize, Schema, check_label_name
from data_pipeline.sources import LabelColumn, SourceInputs, class_names_of
from data_pipeline.sources.folder import (
    ImageFolder,
    check_same_size,
    decode_picture,
    describe_draw,
    in_test_split,
    picture_digests,
)

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
    """

    image_size: ImageSize | None = Field(None, exclude=True)
    test_share: float | None = Field(None, gt=0, lt=1, exclude=True)
    labels: Path | None = Field(None, exclude=True)


class Folder:
    """The source folder: an `ImageFolder`, or with a table of labels a `PictureTable`."""

    needs_root: ClassVar[bool] = True
    options_schema: ClassVar[type[Schema]] = FolderOptions

    @classmethod
    def open(cls, given: SourceInputs) -> ImageFolder | PictureTable:
        options, root = given.read(FolderOptions), given.required_root()
        size, share = options.image_size, options.test_share
        if options.labels is None:
            return ImageFolder(root, split=given.split, image_size=size, test_share=share, seed=given.seed)
        return PictureTable(root, options.labels, split=given.split, image_size=size, test_share=share, seed=given.seed)


class PictureTable:
    """The pictures of one split, in the order of their names, with the labels that a table gives them.

    `file` is relative to `root` and has no "..". The column `split`, if there is one, names the split of each picture.
    Without it, a picture in the folder `train` or `test` of `root` is in that split; without these, `in_test_split`
    draws the share `test_share` of all pictures, spread over the groups of equal labels. Each split has all classes of
    a label, also those that only the other split shows. `middle_square` brings each picture to `image_size`; if that is
    None, all pictures must have the size of the first.

    Raises `UserError` if the table or a picture is missing, or if a column or a cell is wrong. Reading a record raises
    it if the picture does not decode or has another size.
    """

    title = "picture"

    def __init__(
        self,
        root: Path,
        table: Path,
        *,
        split: str,
        image_size: int | None = None,
        test_share: float | None = None,
        seed: int = 0,
    ) -> None:
        self.root, self.image_size, self._table = root, image_size, table
        self.description = "folder with a table of labels"
        if image_size is not None:
            self.description += f", middle {image_size}x{image_size}"
        columns = _read_table(table)
        self._files = [self._below_root(name) for name in columns.pop(FILE_COLUMN)]
        splits = columns.pop(SPLIT_COLUMN, None)
        self._check_files()
        labels = {name: self._label(name, cells) for name, cells in columns.items()}
        chosen_N = self._in_split(split, splits, labels, test_share=test_share, seed=seed)
        rows_N = np.array(sorted(np.flatnonzero(chosen_N).tolist(), key=lambda row: self._files[row]), dtype=np.int64)
        self._files = [self._files[row] for row in rows_N.tolist()]
        self.more_labels = {
            name: LabelColumn(label.title, label.classes, label.label_N[rows_N]) for name, label in labels.items()
        }
        base = self.more_labels.pop(BASE, None)
        self.class_names: tuple[str, ...] = () if base is None else base.classes
        self.labels: NDArray[np.int64] = np.full(len(rows_N), NO_LABEL) if base is None else base.label_N
        self._shape = decode_picture(self.path(0), image_size).shape

    def _below_root(self, name: str) -> str:
        """Return the path of a picture relative to `root`, without "." and "//", so that each file has one name.

        Raises `UserError` if the path has ".." or is outside of `root`. Behind a link, only the file system knows what
        ".." is.
        """
        path = PurePath(name)
        if path.is_absolute() and path.is_relative_to(top := self.root.absolute()):
            path = path.relative_to(top)
        if path.is_absolute() or ".." in path.parts:
            raise UserError(
                f"{self._table} names {name}, which is not a path below {self.root}; write it without .., relative to "
                "--root"
            )
        return str(path)

    def _check_files(self) -> None:
        """Raise `UserError` if a picture is named twice or does not exist."""
        if not self.root.is_dir():
            raise UserError(f"{self.root} is not a folder; give --root the folder to which {self._table} refers")
        name, num = Counter(self._files).most_common(1)[0]
        if num > 1:
            raise UserError(f"{self._table} names {name} {num} times; give each picture one line")
        missing = [name for name in self._files if not (self.root / name).is_file()]
        if missing:
            raise UserError(
                f"{self._table} names {len(missing)} files that are not in {self.root}, such as {missing[0]}; give "
                "--root the folder to which they are relative"
            )

    def _label(self, name: str, cells: list[str]) -> LabelColumn:
        """Return one label of all pictures of the table."""
        if not any(cells):
            raise UserError(f"{self._table} has no value in the column {name}; fill it, or remove the column")
        if name == BASE and not all(cells):
            raise UserError(
                f"{self._table} gives {self._files[cells.index('')]} no value in the column {BASE}, which every "
                "picture needs; fill it, or give the column another name"
            )
        classes = class_names_of({cell for cell in cells if cell})
        numbers = {word: number for number, word in enumerate(classes)} | {"": NO_LABEL}
        return LabelColumn(name, classes, np.array([numbers[cell] for cell in cells], dtype=np.int64))

    def _in_split(
        self,
        split: str,
        splits: list[str] | None,
        labels: dict[str, LabelColumn],
        *,
        test_share: float | None,
        seed: int,
    ) -> NDArray[np.bool_]:
        """Return whether each picture of the table is in `split`, (N,) bool."""
        if splits is None and any((self.root / name).is_dir() for name in _SPLITS):
            splits = [_first_folder(name) for name in self._files]
        if splits is not None:
            if test_share is not None:
                raise UserError(
                    f"{self._table} or the folders of {self.root} say which split a picture is in, so it takes no "
                    "test_share; leave it out"
                )
            splits = [name.lower() for name in splits]
            self._check_splits(split, splits)
            return np.array([name == split for name in splits])
        if test_share is None:
            raise UserError(
                f"{self._table} has no column {SPLIT_COLUMN}, so both splits would hold the same pictures; add it, or "
                f"give {SOURCE_OPTION} test_share=0.2 to both builds, which draws a test split"
            )
        digests = picture_digests(self.path, len(self._files), title=f"splitting {self.root.name} into train and test")
        _, group_N = np.unique(np.stack([label.label_N for label in labels.values()]), axis=1, return_inverse=True)
        in_test_N = in_test_split(digests, group_N.reshape(-1), test_share=test_share, seed=seed, carry_rounding=True)
        self.description += describe_draw(in_test_N, test_share=test_share, seed=seed)
        chosen_N: NDArray[np.bool_] = in_test_N == (split == "test")
        if not chosen_N.any():
            raise UserError(f"test_share={test_share} leaves the {split} split of {self._table} empty; choose another")
        return chosen_N

    def _check_splits(self, split: str, splits: list[str]) -> None:
        """Raise `UserError` if no picture is in `split`; count those that are in neither split."""
        if split not in splits:
            found = ", ".join(sorted(set(splits))[:_NUM_NAMED])
            raise UserError(f"{self._table} has no picture in the split {split}, only in {found}; name one {split}")
        if others := Counter(name for name in splits if name not in _SPLITS):
            counts = ", ".join(f'{num} in "{name}"' for name, num in others.most_common(_NUM_NAMED))
            num = others.total()
            logger.warning("%s: left out %d pictures that are in neither split: %s", self._table, num, counts)

    def path(self, number: int) -> Path:
        """Return the file of a record."""
        return self.root / self._files[number]

    def __getitem__(self, number: int) -> Record:
        pixels = decode_picture(self.path(number), self.image_size)
        check_same_size(pixels, self.path(number), shape=self._shape, first=self.path(0))
        return Record(pixels, int(self.labels[number]))


def _first_folder(name: str) -> str:
    """Return the first folder of the path of a file; "." if the path has no folder."""
    first, *rest = Path(name).parts
    return first if rest else "."


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
        raise UserError(f"{path} cannot be read as a csv file ({error}); name another by labels=") from None
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
