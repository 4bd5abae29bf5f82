"""The parts of the page, without a format; `as_markdown` writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.reports.suppression.verdicts import Mark


@dataclass(frozen=True)
class Cell:
    """A text in a table. `mark` says how it compares with the best; `is_floor` that it is not above the floor."""

    text: str
    mark: Mark = ""
    is_floor: bool = False


@dataclass(frozen=True)
class Row:
    """A row of a table: its title, its cells, and whether it is a reference such as chance, and no cure."""

    title: str
    cells: Sequence[Cell]
    is_reference: bool = False


@dataclass(frozen=True)
class Table:
    """A table: the titles of all columns, the rows, and a caption."""

    head: Sequence[str]
    rows: Sequence[Row]
    caption: str = ""


@dataclass(frozen=True)
class Text:
    """A paragraph, the items of a list, or lines of code."""

    lines: Sequence[str]
    kind: Literal["paragraph", "list", "code"] = "paragraph"


@dataclass(frozen=True)
class Picture:
    """A figure: the name of its file without an ending, its title, and the PNG."""

    name: str
    title: str
    png: bytes


Block = Table | Text | Picture


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    title: str
    blocks: Sequence[Block]


def text(*lines: str) -> Text:
    return Text(lines)
