"""Write the page as Markdown, with its figures as PNG files in a directory beside it."""

from __future__ import annotations

from pathlib import Path

from trainer.reports.as_markdown import markdown_text
from trainer.reports.suppression.blocks import Block, Cell, Picture, Table, Text
from trainer.reports.suppression.page import Page
from trainer.run_dir import write_atomically


def write_markdown(page: Page, out: Path) -> None:
    """Write `out`, such as docs/suppression.md, and a picture docs/suppression/NAME.png for each figure."""
    parts = [f"# {markdown_text(page.title)}"]
    for section in page.sections:
        parts += [f"## {markdown_text(section.title)}"] if section.title else []
        for block in section.blocks:
            if isinstance(block, Picture):
                place = out.with_suffix("") / f"{block.name}.png"
                place.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(place, block.png)
            parts.append(_markdown(block, out))
    write_atomically(out, "\n\n".join(parts) + "\n")


def _markdown(block: Block, out: Path) -> str:
    if isinstance(block, Picture):
        return f"![{markdown_text(block.title)}]({out.stem}/{block.name}.png)"
    if isinstance(block, Text):
        if block.kind == "code":
            return "\n".join(f"    {line}" for line in block.lines)
        if block.kind == "list":
            return "\n".join(f"- {markdown_text(line)}" for line in block.lines)
        return markdown_text(" ".join(block.lines))
    return _table(block)


def _table(table: Table) -> str:
    lines = [_line([markdown_text(title) for title in table.head]), _line(["---"] * len(table.head))]
    for row in table.rows:
        title = markdown_text(row.title)
        lines.append(_line([f"*{title}*" if row.is_reference else title, *(_cell(cell) for cell in row.cells)]))
    body = "\n".join(lines)
    return f"{body}\n\n{markdown_text(table.caption)}" if table.caption else body


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    words = markdown_text(cell.text)
    words = f"**{words}**" if cell.mark == "best" and words else words
    return words + (" ≈" if cell.mark == "tied" else "") + (" ○" if cell.is_floor else "")
