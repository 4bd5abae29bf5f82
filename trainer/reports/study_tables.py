"""A filled study as tables: the paper's grid with our accuracy in each cell, and the directions of the differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from trainer.reports.published import Study
from trainer.reports.study_sheet import FilledCell, Sheet, missing_commands, summary
from trainer.reports.tables import Grid, signed

MEASURES = {
    "linear": "linear probe, test accuracy in % after the probe's last epoch",
    "knn_best": "kNN vote, test accuracy in %, best checkpoint",
}


@dataclass(frozen=True)
class StudyCell:
    """The lines of a cell. The first is our accuracy, or the reason why there is none."""

    lines: Sequence[str]
    is_measured: bool


@dataclass(frozen=True)
class StudySection:
    """The parts of a study that a report shows.

    study: the published table.
    measure: the quantity in its cells, in words.
    groups: the title of each group of columns, and the number of its columns.
    rows: the title of each row, and its cells; None if the paper's table has no such cell.
    """

    study: Study
    measure: str
    sentences: Sequence[str]
    groups: Sequence[tuple[str, int]]
    rows: Sequence[tuple[str, Sequence[StudyCell | None]]]
    directions: Grid
    missing_commands: Sequence[str]

    @property
    def grid(self) -> Grid:
        """The table with one line of text in each cell."""
        head = [self.study.row_title, *(f"{column.group}: {column.title}" for column in self.study.columns)]
        rows = [[title, *("; ".join(cell.lines) if cell else "" for cell in cells)] for title, cells in self.rows]
        return Grid(head, rows)


def study_section(sheet: Sheet) -> StudySection:
    study = sheet.study
    groups = groupby(study.columns, key=lambda column: column.group)
    rows = [
        (row, [_cell(sheet.cells.get((row, number))) for number in range(len(study.columns))]) for row in study.rows
    ]
    return StudySection(
        study=study,
        measure=MEASURES[study.measure],
        sentences=summary(sheet),
        groups=[(group, len(list(members))) for group, members in groups],
        rows=rows,
        directions=_directions(sheet),
        missing_commands=missing_commands(sheet),
    )


def _cell(filled: FilledCell | None) -> StudyCell | None:
    """Return our accuracy, also with batch norm in train mode if probed, the paper's, and the differences."""
    if filled is None:
        return None
    published = filled.cell.published
    lines = [str(filled.score) if filled.score else filled.missing]
    if filled.in_train_mode is not None:
        lines.append(f"train mode {filled.in_train_mode}")
    lines.append("paper: no number" if published is None else f"paper {published}")
    if filled.difference is not None:
        lines.append(signed(filled.difference))
    elif filled.score is not None and filled.unlike:
        lines.append("not comparable")
    if filled.difference_in_train_mode is not None:
        lines.append(f"train mode {signed(filled.difference_in_train_mode)}")
    return StudyCell(lines, is_measured=filled.score is not None)


def _directions(sheet: Sheet) -> Grid:
    """Return a table of the differences that the paper shows, and ours."""
    rows = [
        [
            one.name,
            ("+" if one.contrast.sign > 0 else "−") if one.contrast.points is None else signed(one.contrast.points),
            None if one.points is None else signed(one.points),
            None if one.resolution is None else f"{one.resolution:.1f}",
            one.direction,
        ]
        for one in sheet.compared
    ]
    return Grid(["difference in points", "paper", "ours", "resolved from", "direction"], rows)
