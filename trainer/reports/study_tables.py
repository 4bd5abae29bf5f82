"""A filled study as tables: the paper's grid with ours in each cell, and the differences whose direction compares."""

from __future__ import annotations

from html import escape
from itertools import groupby

from trainer.reports.grid import Grid, columns, prose, scroll, to_html
from trainer.reports.study_sheet import Filled, Sheet, missing_commands, summary

MEASURES = {
    "linear": "linear probe, test accuracy in % after the probe's last epoch",
    "knn_best": "kNN vote, test accuracy in %, best checkpoint",
}


def study_html(sheet: Sheet) -> str:
    """The section of a page; its headings are of the third level."""
    study = sheet.study
    sentences = "".join(f"<p>{prose(text)}</p>" for text in summary(sheet))
    groups = "".join(
        f'<th class="group" colspan="{len(list(members))}">{escape(group)}</th>'
        for group, members in groupby(study.columns, key=lambda column: column.group)
    )
    titles = "".join(f'<th class="number">{escape(column.title)}</th>' for column in study.columns)
    body = ""
    for row in study.rows:
        cells = "".join(
            _html_cell(sheet.cells.get((row, number)), f"{column.group}: {column.title}")
            for number, column in enumerate(study.columns)
        )
        body += f"<tr><th>{escape(row)}</th>{cells}</tr>"
    commands = missing_commands(sheet)
    missing = f"<p>To measure what is missing:</p><pre>{escape(chr(10).join(commands))}</pre>" if commands else ""
    table = (
        f'<table class="wide study cards"><thead><tr><th></th>{groups}</tr>'
        f"<tr><th>{escape(study.row_title)}</th>{titles}</tr></thead><tbody>{body}</tbody></table>"
    )
    return (
        f'<p class="caption">{escape(study.source)}. Ours: {MEASURES[study.measure]}, mean ± sample standard deviation '
        "over seeds; below it what the paper has, and ours less the paper's.</p>"
        f"{sentences}{scroll(table)}{missing}<h3>Directions</h3>{to_html(direction_grid(sheet), numbers=True)}"
    )


def _html_cell(filled: Filled | None, head: str) -> str:
    if filled is None:
        return '<td class="number"></td>'
    ours, *small = _lines(filled)
    shown = escape(ours) if filled.score else f'<span class="none">{escape(ours)}</span>'
    lines = "".join(f"<small>{prose(text)}</small>" for text in small)
    return f'<td class="number" data-head="{escape(head)}"><div>{shown}{lines}</div></td>'


def _lines(filled: Filled) -> list[str]:
    """Return ours, ours with batch norm in train mode if it was probed, the paper's, and the differences."""
    published = filled.cell.published
    lines = [str(filled.score) if filled.score else filled.missing]
    if filled.in_train_mode is not None:
        lines.append(f"train mode {filled.in_train_mode}")
    lines.append("paper: no number" if published is None else f"paper {published}")
    if filled.difference is not None:
        lines.append(_signed(filled.difference))
    elif filled.score is not None and filled.unlike:
        lines.append("another scale")
    if filled.difference_in_train_mode is not None:
        lines.append(f"train mode {_signed(filled.difference_in_train_mode)}")
    return lines


def study_grid(sheet: Sheet) -> Grid:
    """The same as one grid of text."""
    study = sheet.study
    head = [study.row_title, *(f"{column.group}: {column.title}" for column in study.columns)]
    rows = [
        [
            row,
            *(
                "" if (filled := sheet.cells.get((row, number))) is None else "; ".join(_lines(filled))
                for number in range(len(study.columns))
            ),
        ]
        for row in study.rows
    ]
    return columns(head, rows)


def direction_grid(sheet: Sheet) -> Grid:
    """The differences that the paper shows, beside ours."""
    rows = [
        [
            one.name,
            ("+" if one.contrast.sign > 0 else "−") if one.contrast.points is None else _signed(one.contrast.points),
            None if one.points is None else _signed(one.points),
            None if one.resolution is None else f"{one.resolution:.1f}",
            one.direction,
        ]
        for one in sheet.compared
    ]
    return columns(["difference in points", "paper", "ours", "resolved from", "direction"], rows)


def _signed(points: float) -> str:
    return f"{points:+.1f}".replace("-", "−")
