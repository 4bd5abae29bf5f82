"""Tell what files mean: the split of each record and its labels.

- Labels come from the first of `KNOWN_LAYOUTS` that fits, such as a table. Otherwise the class of a record is its first
  folder below that of the split, as in torchvision's ImageFolder; `class_from` names another level. Records without a
  class folder are left out, unless there are fewer than two classes: then none has a label.
- The folders `train` or `training`, `test` or `testing`, and `val`, `valid`, `validation` or `dev` are splits, in
  capitals or not, if there is one for training or for testing. So are these words in a table. Besides train and test,
  validation files are left out; without test, they are the test split.
- If all files lie in one folder, the splits and classes are looked for in that folder.

Shapes: N records.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError
from data_pipeline.core.label_words import MAX_CLASSES, as_number, as_word, choose_classes, normal
from data_pipeline.core.sample import BASE, Medium
from data_pipeline.sources import LabelColumn
from data_pipeline.sources.files import Files, medium_of
from data_pipeline.sources.known_layouts import KNOWN_LAYOUTS, TEST, TRAIN, VAL, Found, Look
from data_pipeline.storage.locations import PICTURE_ENDINGS, SOUND_ENDINGS

logger = logging.getLogger(__name__)

_SPLITS: Final = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("test", "testing"), TEST),
    **dict.fromkeys(("val", "valid", "validation", "dev"), VAL),
}
_NUM_NAMED: Final = 10  # splits in a message
_NUM_TEXTS: Final = 1_000  # that nearly all differ are captions or names, and no classes


def split_of(word: str) -> str:
    """Return the split that a word means, such as the name of a folder: "train", "test" or "val"; "" if it is none."""
    return _SPLITS.get(word.casefold(), "")


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
        has_class_folders: whether the only label is that of class folders; then no split may lack one.
        drawn: in words for the manifest how the splits were drawn; empty if they were not.
    """

    files: Files
    kind: str
    medium: Medium
    names: Sequence[str]
    split_N: NDArray[np.str_] | None
    labels: Mapping[str, LabelColumn]
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    has_class_folders: bool = False
    drawn: str = ""

    def log_notes(self) -> None:
        """Log what was assumed, and warn of what was left out, with the number of files and one of them."""
        for sentence, names in self.notes.items():
            if names:
                logger.warning("%s: %s (%d, such as %s)", self.files.root, sentence, len(names), names[0])
            else:
                logger.info("%s: %s", self.files.root, sentence)


def find_layout(files: Files, medium: Medium, *, labels: Path | None = None, class_from: str | None = None) -> Layout:
    """Return what the files of pictures or sounds mean.

    `labels` is a table whose files are relative to the root of `files`. `class_from` is the level of the folder that is
    the class, whatever a table says: "path:0" is the first below that of the split, "path:-1" the one that holds the
    file.

    Raises `UserError` if there are no such files, or if a table is wrong.
    """
    look = Look(files, medium, labels, [], [], {})
    for name in files.names:
        (look.names if medium_of(name) == medium else look.beside).append(name)
    found = next(filter(None, (rule(look) for rule in KNOWN_LAYOUTS)), None) or Found("folder", look.names)
    if look.beside:
        look.notes[f"ignored files that are no {medium}"] = look.beside
    for name, why in files.others.items():
        look.notes.setdefault(f"ignored {why}", []).append(name)
    if not found.names:
        known = PICTURE_ENDINGS if medium == "picture" else SOUND_ENDINGS
        endings = ", ".join(f".{ending}" for ending in sorted(known))
        raise UserError(f"{files.root} holds no {medium}s ({endings}); give --root the folder that holds them")
    num_above = _num_common_folders(found.names)
    if found.splits is None:
        folders = [_folder(name, num_above) for name in found.names]
        if {TRAIN, TEST} & set(map(split_of, set(folders))):
            found.splits = folders
            num_above += 1
    if found.splits is not None:
        found = _used(found, found.splits, look.notes)
    columns: dict[str, LabelColumn] = {}
    if class_from is not None or (found.classes_are_folders and BASE not in found.words):
        found.words.pop(BASE, None)
        level = int((class_from or "path:0").removeprefix("path:"))
        found, columns = _class_folders(found, [_folder(name, num_above, level) for name in found.names], look)
        found.kind += f", class {class_from}" if class_from else ""
    has_class_folders = BASE in columns
    for label, words in found.words.items():
        word_of = {word: as_word(word) for word in set(words)}
        classes = choose_classes(set(word_of.values()), known=found.classes.get(label))
        are_words = any(word and as_number(word) is None for word in word_of.values())
        are_texts = are_words and len(word_of) > max(_NUM_TEXTS, len(words) // 2)
        if 1 <= len(classes.names) <= MAX_CLASSES and not are_texts:
            number_of = {word: classes.number_of[each] for word, each in word_of.items()}
            title = medium if label == BASE else label
            columns[label] = _column(title, classes.names, number_of, words)
        else:
            look.notes[f"left out the label {label}, which has {len(classes.names)} different values"] = []
    return Layout(
        files=files,
        kind=found.kind if columns else f"{found.kind} without labels",
        medium=medium,
        names=found.names,
        split_N=None if found.splits is None else np.array(found.splits),
        labels=columns,
        notes=look.notes,
        has_class_folders=has_class_folders and len(columns) == 1,
    )


def _num_common_folders(names: Sequence[str]) -> int:
    """Return in how many folders, one in the other, all files lie, if none of these is the folder of a split."""
    folders = [name.split("/")[:-1] for name in (names[0], names[-1])]  # what these two share, all share
    for level, (first, last) in enumerate(zip(*folders, strict=False)):
        if first != last or split_of(first):
            return level
    return min(map(len, folders))


def _folder(name: str, num_above: int, level: int = 0) -> str:
    """Return a folder of a file by its level below `num_above` folders; "" if there is none."""
    folders = name.split("/")[num_above:-1]
    return folders[level] if -len(folders) <= level < len(folders) else ""


def _used(found: Found, words: Sequence[str], notes: dict[str, list[str]]) -> Found:
    """Return the records that are for training or for testing, with these splits; note what is left out."""
    splits = {word: split_of(word) for word in set(words)}
    if TRAIN in splits.values() and TEST not in splits.values() and VAL in splits.values():
        splits = {word: TEST if split == VAL else split for word, split in splits.items()}
        notes["there is no test split, so the validation files are it"] = []
    used = {word for word, split in splits.items() if split in (TRAIN, TEST)}
    if others := Counter(word for word in words if word not in used):
        counts = ", ".join(f'{num} in "{word}"' for word, num in others.most_common(_NUM_NAMED))
        outside = [name for name, word in zip(found.names, words, strict=True) if word not in used]
        notes[f"left out what is in neither split: {counts}"] = outside
    found.splits = [splits[word] for word in words]
    return found.choose([row for row, word in enumerate(words) if word in used])


def _class_folders(found: Found, folders: Sequence[str], look: Look) -> tuple[Found, dict[str, LabelColumn]]:
    """Return the records that lie in a class folder, with this label; or all, if there are fewer than two classes."""
    class_of = {folder: normal(folder) for folder in set(folders) - {""}}
    classes = tuple(sorted(set(class_of.values())))
    if len(classes) < 2:
        if classes:
            look.notes[f"there is only one class folder ({classes[0]}), so no {look.medium} has a label"] = []
        return found, {}
    if outside := [name for name, folder in zip(found.names, folders, strict=True) if not folder]:
        look.notes["left out what lies in no class folder"] = outside
    number_of = {folder: classes.index(name) for folder, name in class_of.items()}
    base = _column(look.medium, classes, number_of, [folder for folder in folders if folder])
    return found.choose([row for row, folder in enumerate(folders) if folder]), {BASE: base}


def _column(title: str, classes: tuple[str, ...], number_of: Mapping[str, int], words: Sequence[str]) -> LabelColumn:
    return LabelColumn(title, classes, np.array([number_of[word] for word in words], dtype=np.int64))
