"""Tell what files mean by where they lie: the split of each record and its labels.

- The folders `train` or `training`, `test` or `testing`, and `val`, `valid`, `validation` or `dev` are splits, in
  capitals or not, if there is one for training or for testing. Besides train and test, validation files are left out;
  without test, they are the test split.
- The class of a record is its first folder below that of the split, as in torchvision's ImageFolder; `class_from` names
  another level. Records without a class are left out, unless there are fewer than two classes: then none has a label.
- If all files lie in one folder, the splits and classes are looked for in that folder.

Shapes: N records.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import BASE, NO_LABEL, Medium
from data_pipeline.sources import LabelColumn
from data_pipeline.sources.files import Files, Names, ending_of
from data_pipeline.storage.locations import PICTURE_ENDINGS

logger = logging.getLogger(__name__)

SUFFIXES: Final[Mapping[Medium, frozenset[str]]] = {
    "picture": frozenset(f".{ending}" for ending in PICTURE_ENDINGS),
    "sound": frozenset({".aif", ".aiff", ".au", ".flac", ".mp3", ".oga", ".ogg", ".opus", ".wav"}),
}
TRAIN, TEST, _VAL = "train", "test", "val"
_SPLIT_OF_FOLDER: Final = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("test", "testing"), TEST),
    **dict.fromkeys(("val", "valid", "validation", "dev"), _VAL),
}


@dataclass(frozen=True)
class Layout:
    """What the files of a source mean.

    Attributes:
        kind: the layout in words, for the log and the manifest.
        medium: whether the records are pictures or sounds.
        names: the records of all splits, sorted by the parts of their paths.
        split_N: the split of each, "train" or "test"; None if nothing says it.
        labels: each label of all records by name; empty if there is none.
        notes: what was assumed or left out, as a sentence, with the names of the files that it is about.
        has_class_folders: whether the classes are folders; then no split may lack one.
    """

    files: Files
    kind: str
    medium: Medium
    names: Names
    split_N: NDArray[np.str_] | None
    labels: Mapping[str, LabelColumn]
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    has_class_folders: bool = False

    def log_notes(self) -> None:
        """Log what was assumed, and warn of what was left out, with the number of files and one of them."""
        for sentence, names in self.notes.items():
            if names:
                logger.warning("%s: %s (%d, such as %s)", self.files.root, sentence, len(names), names[0])
            else:
                logger.info("%s: %s", self.files.root, sentence)


def find_layout(files: Files, medium: Medium, *, class_from: str | None = None) -> Layout:
    """Return what the files of pictures or sounds mean.

    `class_from` is the level of the folder that is the class: "path:0" is the first below that of the split, "path:-1"
    the one that holds the file. Raises `UserError` if there are no such files.
    """
    records: list[str] = []
    notes: dict[str, list[str]] = {}
    for name in files.names:
        if ending_of(name) in SUFFIXES[medium]:
            records.append(name)
        else:
            notes.setdefault(f"ignored files that are no {medium}", []).append(name)
    for name, why in files.others.items():
        notes.setdefault(f"ignored {why}", []).append(name)
    if not records:
        endings = ", ".join(sorted(SUFFIXES[medium]))
        raise UserError(f"{files.root} holds no {medium}s ({endings}); give --root the folder that holds them")
    records, splits, num_above = _in_splits(records, notes)
    level = int((class_from or "path:0").removeprefix("path:"))
    words = [_class(name.split("/")[num_above:-1], level) for name in records]
    classes = _classes(words, notes)
    if has_labels := len(classes) > 1:
        kept = [number for number, word in enumerate(words) if word]
        if len(kept) < len(records):
            outside = [name for name, word in zip(records, words, strict=True) if not word]
            notes["left out what lies in no class folder"] = outside
            records, words = [records[number] for number in kept], [words[number] for number in kept]
            splits = splits and [splits[number] for number in kept]
    elif classes:
        notes[f"there is only one class folder ({classes[0]}), so no {medium} has a label"] = []
    numbers = {word: number for number, word in enumerate(classes)}
    column = LabelColumn(medium, classes, np.array([numbers.get(word, NO_LABEL) for word in words], dtype=np.int64))
    return Layout(
        files=files,
        kind=("folder" if has_labels else "folder without labels") + (f", class {class_from}" if class_from else ""),
        medium=medium,
        names=Names(records),
        split_N=None if splits is None else np.array(splits),
        labels={BASE: column} if has_labels else {},
        notes=notes,
        has_class_folders=has_labels,
    )


def _in_splits(records: list[str], notes: dict[str, list[str]]) -> tuple[list[str], list[str] | None, int]:
    """Return the records in use, the split of each if folders say it, and the number of folders above the classes."""
    folders = [name.split("/")[:-1] for name in (records[0], records[-1])]  # what both share, all share
    num_above = 0
    for first, last in zip(*folders, strict=False):
        if first != last or first.casefold() in _SPLIT_OF_FOLDER:
            break
        num_above += 1
    of_folder = {folder: _SPLIT_OF_FOLDER.get(folder.casefold()) for folder in _folders(records, num_above)}
    there = set(of_folder.values())
    if not there & {TRAIN, TEST}:
        return records, None, num_above
    if TEST not in there and _VAL in there:
        of_folder = {folder: TEST if split == _VAL else split for folder, split in of_folder.items()}
        notes["there is no folder test, so the validation files are the test split"] = []
    kept, splits = [], []
    for name in records:
        split = of_folder.get(name.split("/")[num_above])
        if split in (TRAIN, TEST):
            kept.append(name)
            splits.append(split)
        else:
            where = "in a folder of validation files" if split == _VAL else "beside the folders of the splits"
            notes.setdefault(f"left out what lies {where}", []).append(name)
    return kept, splits, num_above + 1


def _folders(records: Sequence[str], level: int) -> set[str]:
    return {name.split("/")[level] for name in records if name.count("/") > level}


def _class(folders: Sequence[str], level: int) -> str:
    """Return the class that one of the folders above a file names; "" if there is no such folder."""
    return folders[level] if -len(folders) <= level < len(folders) else ""


def _classes(words: list[str], notes: dict[str, list[str]]) -> tuple[str, ...]:
    """Bring the classes of all records to NFC. Return each once, sorted."""
    written = {word: unicodedata.normalize("NFC", word) for word in sorted(set(words)) if word}
    words[:] = [written.get(word, "") for word in words]
    if twice := [word for word in written if word != written[word] and written[word] in written]:
        notes["took class folders that Unicode writes in two ways as one"] = twice
    return tuple(sorted(set(written.values())))
