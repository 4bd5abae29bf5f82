"""A table as plain text, and its two forms: HTML and Markdown."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from html import escape

_SPECIAL = re.compile(r"[\\`*\[\]<>|#]|(?<!\w)_|_(?!\w)")  # an underline within a word is one
NOT_MEASURED_TEXT = "not measured"
NOT_MEASURED = f'<span class="none">{NOT_MEASURED_TEXT}</span>'


@dataclass(frozen=True)
class Grid:
    """`rows` are as long as `head`, and begin with their title. None is what was not measured."""

    head: tuple[str, ...]
    rows: tuple[tuple[str | None, ...], ...]


def to_html(grid: Grid, *, code: Container[str] = (), numbers: bool = False) -> str:
    """Return a table. `code`: titles of rows and columns whose cells are set as code. `numbers`: set to the right.

    Each cell names its column as well (`data-head`), for a narrow screen, where a row becomes a list.
    """
    kind = "number" if numbers else "text"
    head = f"<th>{escape(grid.head[0])}</th>"
    head += "".join(f'<th class="{kind}">{escape(title)}</th>' for title in grid.head[1:])
    body = ""
    for title, *cells in grid.rows:
        body += f"<tr><th>{escape(title or '')}</th>"
        for column, cell in zip(grid.head[1:], cells, strict=True):
            text = NOT_MEASURED if cell is None else escape(cell)
            if cell is not None and (title in code or column in code):
                text = f"<code>{text}</code>"
            body += f'<td class="{kind}" data-head="{escape(column)}">{text}</td>'
        body += "</tr>"
    return scroll(f'<table class="cards"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def scroll(table: str) -> str:
    """Return a table that scrolls sideways by itself in a window that is too narrow; a shadow hints at it."""
    return f'<div class="scroll" tabindex="0">{table}</div>'


def prose(text: str) -> str:
    """Return text as HTML in which no line breaks between a number and its unit or its deviation."""
    return re.sub(r"(?<=\S) (?=%)|(?<=\d) (?=±)|(?<=±) (?=\d)", "&nbsp;", escape(text))


def to_markdown(grid: Grid) -> str:
    """A table as GitHub and pandoc read it."""
    lines = [grid.head, tuple("---" for _ in grid.head), *grid.rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def markdown_text(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return " ".join(_SPECIAL.sub(r"\\\g<0>", text).split())


def _cell(text: str | None) -> str:
    return f"*{NOT_MEASURED_TEXT}*" if text is None else markdown_text(text)


def columns(titles: Sequence[str], rows: Sequence[Sequence[str | None]]) -> Grid:
    """A grid from a head and rows of any sequence type."""
    return Grid(tuple(titles), tuple(tuple(row) for row in rows))
