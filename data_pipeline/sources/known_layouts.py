"""Read the labels of known layouts: tables, files beside the records, and names of spoken digits.

- A table of labels that the user names.
- `metadata.csv` or `metadata.jsonl` with names of files relative to its folder, as of the Hub's imagefolder.
- AudioMNIST and the Free Spoken Digit Dataset: every sound is named `DIGIT_SPEAKER_NUMBER.wav`.
- A file beside each record: `a.cls` or `a.json` beside `a.png`, as in WebDataset.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Final

from data_pipeline.core.errors import UserError
from data_pipeline.core.label_words import normal
from data_pipeline.core.sample import BASE, Medium
from data_pipeline.sources.files import Files, ending_of
from data_pipeline.sources.tables import NoFilesError, Table, label_columns, read_table, words_of

TRAIN, TEST, VAL = "train", "test", "val"
# The published test split of AudioMNIST; Tamkin et al. 2022 train on its training and validation speakers.
TEST_SPEAKERS: Final = ("05", "13", "18", "22", "26", "32", "33", "42", "45", "51", "52", "60")
FSDD_TEST_SPEAKER: Final = "yweweler"
SPOKEN_DIGIT: Final = re.compile(r"(?:.*/)?([0-9])_([0-9]{2}|[a-z]+)_(0|[1-9][0-9]*)\.wav", re.IGNORECASE)


@dataclass
class Found:
    """Records, sorted by the parts of their paths, with the word of each for every label, and for its split.

    `splits` is None if nothing says them. `classes` are those of a label in their order, if they are known. If
    `classes_are_folders`, the folders of the records are the classes of `base`, unless `words` has this label.
    """

    kind: str
    names: list[str]
    words: dict[str, list[str]] = field(default_factory=dict)
    splits: list[str] | None = None
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    classes_are_folders: bool = True

    def choose(self, rows: Sequence[int]) -> Found:
        """Return some of the records, in the order of `rows`."""
        words = {label: [cells[row] for row in rows] for label, cells in self.words.items()}
        splits = None if self.splits is None else [self.splits[row] for row in rows]
        return replace(self, names=[self.names[row] for row in rows], words=words, splits=splits)


@dataclass
class Look:
    """What a rule looks at: the files of the medium, those beside them, and the notes that it adds to.

    A rule takes out of `beside` what it has used.
    """

    files: Files
    medium: Medium
    table: Path | None
    names: list[str]
    beside: list[str]
    notes: dict[str, list[str]]

    def take(self, ending: str) -> list[str]:
        """Take the files whose last parts are `ending` out of `beside`, and return them."""
        taken = [name for name in self.beside if f"/{name}".endswith(f"/{ending}")]
        if taken:
            self.beside = [name for name in self.beside if name not in taken]
        return taken

    def text(self, name: str) -> str:
        """Return the text of a file. Raises `UserError` if it cannot be read."""
        return self.files.decoded(name, lambda data: data.decode("utf-8-sig"))


def _columns(look: Look) -> Found | None:
    """Take the labels of a Parquet table, or of a dataset on disk."""
    if not look.files.columns:
        return None
    where = str(look.files.root)
    rows = {name: row for row, name in enumerate(look.files.names)}
    words = {name: [words[rows[each]] for each in look.names] for name, words in look.files.columns.items()}
    classes = label_columns(where, look.files.classes)
    return Found("table of files", look.names, label_columns(where, words), classes=classes)


def _named_table(look: Look) -> Found | None:
    if look.table is None:
        return None
    look.beside = [name for name in look.beside if look.files.root / name != look.table]
    try:
        table = read_table(str(look.table), look.table.read_bytes())
    except OSError as error:
        raise UserError(f"{look.table} cannot be read as a table ({error.strerror}); name another") from None
    return _of_tables(look, "folder with a table of labels", {"": table})


def _metadata(look: Look) -> Found | None:
    tables = {}
    for name in look.take("metadata.jsonl") + look.take("metadata.csv"):  # of both in one folder, the second
        try:
            tables[name.rpartition("/")[0]] = read_table(str(look.files.root / name), look.files.read(name))
        except NoFilesError:
            look.beside.append(name)
    return _of_tables(look, "folder with a table of labels", tables)


def _of_tables(look: Look, kind: str, tables: Mapping[str, Table]) -> Found | None:
    """Return the records that tables name, relative to a folder each. Raises `UserError` if one is not there."""
    if not tables:
        return None
    words_of: dict[str, list[str]] = {label: [] for table in tables.values() for label in table.labels}
    names, splits = list[str](), list[str]()
    for below, table in tables.items():
        folder = f"{(look.files.root / below).absolute()}/"
        names += [str(PurePath(below, file.removeprefix(folder))) for file in table.files]  # without "./" and "//"
        splits += table.splits or [""] * len(table.files)
        for label, words in words_of.items():
            words += table.labels.get(label) or [""] * len(table.files)
    where = ", ".join(table.where for table in tables.values())
    there = {normal(name): name for name in look.files.names}  # systems write accents and "/" in two ways
    names = [there.get(normal(name)) or there.get(normal(name.replace("\\", "/")), name) for name in names]
    name, num = Counter(names).most_common(1)[0]
    if num > 1:
        raise UserError(f"{where} names {name} {num} times; give each {look.medium} one line")
    if missing := [name for name in names if normal(name) not in there]:
        raise UserError(
            f"{where} names {len(missing)} files that are not in {look.files.root}, such as {missing[0]}; give --root "
            "the folder to which they are relative, and write them without .."
        )
    if unnamed := sorted(set(look.names) - set(names)):
        look.notes["left out what the table of labels does not name"] = unnamed
    found = Found(kind, names, words_of, splits if any(splits) else None, classes_are_folders=False)
    return found.choose(sorted(range(len(names)), key=lambda row: names[row].split("/")))


def _spoken_digits(look: Look) -> Found | None:
    """Take the published test speakers as the test split, if there are others, too."""
    matches = [match for match in map(SPOKEN_DIGIT.fullmatch, look.names) if match]
    if not matches or len(matches) < len(look.names):
        return None
    splits = [TEST if match[2] in (*TEST_SPEAKERS, FSDD_TEST_SPEAKER) else TRAIN for match in matches]
    words = {BASE: [match[1] for match in matches]}
    return Found("spoken digits", look.names, words, splits if len(set(splits)) > 1 else None)


def _files_beside(look: Look) -> Found | None:
    there = {name for name in look.beside if name.endswith((".json", ".cls"))}
    if not there:
        return None
    stems = [name[: len(name) - len(ending_of(name))] for name in look.names]
    words: dict[str, list[str]] = {}
    for ending in (".cls", ".json"):
        texts = [look.text(stem + ending).strip() if stem + ending in there else "" for stem in stems]
        if not any(texts):
            continue
        if ending == ".json":
            where = f"the .json beside each {look.medium} of {look.files.root}"
            try:
                words = label_columns(where, words_of(where, [json.loads(text or "{}") for text in texts])) | words
            except (json.JSONDecodeError, AttributeError, TypeError) as error:
                raise UserError(f"{where} is not an object of JSON ({error}); mend or remove it") from None
        else:
            words[BASE] = texts
        look.beside = [name for name in look.beside if not name.endswith(ending)]
    return Found("folder with files of labels", look.names, words) if words else None


# Each returns the records that it finds, or None if it does not fit.
KNOWN_LAYOUTS: Final[tuple[Callable[[Look], Found | None], ...]] = (
    _named_table,
    _columns,
    _metadata,
    _spoken_digits,
    _files_beside,
)
