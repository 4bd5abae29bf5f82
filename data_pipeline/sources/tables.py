"""Read tables of labels: csv in any dialect, and JSON with an object a line.

    file,split,sex,site,diagnosis
    a/0001.png,train,f,Bonn,none
    a/0002.png,test,m,Kiel,

- The text is UTF-8. The one of comma, semicolon and tab that the header of a csv file
  has most often parts its cells.
- The files are named by the first of `FILE_COLUMNS` that there is, their splits by `SPLIT_COLUMN`, if there is one.
- Every other column is a label; if none is called `base`, the first of `BASE_COLUMNS` is that label. A column without a
  name, such as the index that pandas writes, and columns of lists and objects are left out.
"""

from __future__ import annotations

import csv
import io
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from data_pipeline.core.errors import UserError
from data_pipeline.core.label_words import as_word, check_label_name
from data_pipeline.core.sample import BASE

logger = logging.getLogger(__name__)

FILE_COLUMNS: Final = ("file", "file_name", "filename", "path", "image")
SPLIT_COLUMN: Final = "split"
BASE_COLUMNS: Final = ("label", "class", "cls")
T = TypeVar("T")
_UNNAMED: Final = ("", "Unnamed: 0")


class NoFilesError(UserError):
    """A table without a column that names files."""


@dataclass(frozen=True)
class Table:
    """A table of labels: for each row the file as it is written, its split (None without such a column), and labels.

    A cell of `labels` is the word in the table; `data_pipeline.core.label_words` says which words are no label.
    """

    where: str
    files: list[str]
    splits: list[str] | None
    labels: Mapping[str, list[str]]


def read_table(where: str, data: bytes) -> Table:
    """Read the content of a table; `where` names it in messages, and ends with .jsonl if it holds JSON.

    Raises `UserError` if the table has no row or no column of files, or if a column or a line is wrong.
    """
    try:
        text = data.decode("utf-8-sig")
        columns = (
            words_of(where, [json.loads(line) for line in text.splitlines() if line.strip()])
            if where.endswith(".jsonl")
            else _columns_of_csv(where, text)
        )
    except (UnicodeDecodeError, csv.Error, json.JSONDecodeError, AttributeError) as error:
        raise UserError(f"{where} cannot be read as a table ({error}); save it in UTF-8, or name another") from None
    file_column = next((name for name in FILE_COLUMNS if name in columns), None)
    if file_column is None:
        found = ", ".join(columns)[:200]
        raise NoFilesError(f"{where} has no column {FILE_COLUMNS[0]}, only {found}; name that of the files so")
    files, splits = columns.pop(file_column), columns.pop(SPLIT_COLUMN, None)
    if not files:
        raise UserError(f"{where} holds no line of a file; write a header with {file_column}, and a line for each")
    return Table(where, files, splits, label_columns(where, columns))


def label_columns(where: str, columns: Mapping[str, T]) -> dict[str, T]:
    """Return columns by the names of their labels. Raises `UserError` if a name cannot be that of a label."""
    base = next((name for name in (BASE, *BASE_COLUMNS) if name in columns), None)
    columns = {BASE if name == base else name: words for name, words in columns.items()}
    for name in columns:
        check_label_name(name, where)
    return columns


def _columns_of_csv(where: str, text: str) -> dict[str, list[str]]:
    head_line = text.lstrip().partition("\n")[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=head_line.count))
    # With the number in the file, because empty lines are left out and a cell may hold several lines.
    lines = ((reader.line_num, [cell.strip() for cell in line]) for line in reader if any(line))
    _, head = next(lines, (0, [""]))
    columns: list[list[str]] = [[] for _ in head]
    for number, row in lines:
        if len(row) != len(head):
            raise UserError(f"line {number} of {where} has {len(row)} cells, but its header has {len(head)}; mend it")
        for cells, cell in zip(columns, row, strict=True):
            cells.append(cell)
    if len(head) > 1 and head[0] in _UNNAMED:
        logger.info("%s: left out the first column, which has no name, as the index of pandas", where)
        head, columns = head[1:], columns[1:]
    if twice := [name for name, num in Counter(head).items() if num > 1]:
        raise UserError(f"{where} has several columns {twice[0]}; give each another name")
    return dict(zip(head, columns, strict=True))


def words_of(where: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the entries of objects of JSON as columns of words, "" for a missing one, without lists and objects."""
    columns = {}
    for name in {name: None for row in rows for name in row}:
        try:
            columns[name] = [as_word(row.get(name)) for row in rows]
        except ValueError:
            logger.info("%s: left out the column %s, which holds lists or objects", where, name)
    return columns
