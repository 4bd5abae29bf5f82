"""The report as Markdown: the same sentences and tables, without pictures, for an appendix or a W&B report."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainer.reports import overview
from trainer.reports.findings import limits, verdict
from trainer.reports.page import MOST_COMPARED, title_of
from trainer.reports.rises import rise_grid, rise_notes
from trainer.reports.runs import Arm, runs_of_arms
from trainer.reports.study_sheet import Sheet
from trainer.reports.study_tables import study_section
from trainer.reports.tables import (
    Grid,
    ResultTable,
    difference_grid,
    provenance_grids,
    results,
    speed_grid,
    speed_notes,
)

RESULTS_CAPTION = (
    "Test accuracy in %: linear probe on the frozen encoder after the probe's last epoch, and weighted kNN vote; mean "
    "± sample standard deviation over seeds."
)
GROUPS_CAPTION = (
    "Test accuracy in % in the worst group. A group is a class of one label with a class of another; in brackets is "
    "its number of test samples. The worst of many small groups is low by chance alone, even if all are equally hard: "
    "`python -m trainer.probe` prints what would be expected then."
)
_SPECIAL = re.compile(r"[\\`*\[\]<>|#]|(?<!\w)_|_(?!\w)")  # an underscore within a word is no markup


def as_markdown(arms: Sequence[Arm], sheet: Sheet | None = None) -> str:
    """Return the whole report as Markdown. Equal input gives equal text."""
    parts = [f"# {markdown_text(title_of(arms, sheet))}"]
    for title, body in sections(arms, sheet):
        parts += [f"## {title}", *body]
    return "\n\n".join(parts) + "\n"


def sections(arms: Sequence[Arm], sheet: Sheet | None = None) -> list[tuple[str, list[str]]]:
    """Return the title of each section with the paragraphs, lists and tables below it."""
    runs = runs_of_arms(arms)
    found = [] if sheet is None else [("Against the paper", _study(sheet))]
    if overview.is_large(arms):
        return found + _sections_of_many(arms)
    said = overview.sentences(arms) if len(arms) > MOST_COMPARED else verdict(arms)
    found.append(("What was found", [markdown_text(text) for text in said]))
    body = [RESULTS_CAPTION]
    for table in (table for protocol in results(arms) for table in protocol.tables):
        body += ([f"**{markdown_text(table.title)}**"] if table.title else []) + [to_markdown(_result_grid(table))]
        body += [GROUPS_CAPTION, to_markdown(table.groups)] if table.groups.rows else []
    found.append(("Results", body))
    if (rises := rise_grid(arms)).rows:
        found.append(("Which label rises first", [to_markdown(rises), *map(markdown_text, rise_notes(arms))]))
    found += _limits(arms)
    found.append(("Speed and memory", [to_markdown(speed_grid(arms)), *map(markdown_text, speed_notes(arms))]))
    differing = difference_grid(arms)
    found.append(("Differences between the configs", [to_markdown(differing) if differing.rows else "None."]))
    found.append(("Where the numbers come from", [to_markdown(grid) for grid in provenance_grids(runs)]))
    return found


def _sections_of_many(arms: Sequence[Arm]) -> list[tuple[str, list[str]]]:
    tables: list[str] = []
    for table in overview.tables(arms):
        tables += [f"**{markdown_text(table.title)}**"] if table.title else []
        tables += [to_markdown(table.grid), *map(markdown_text, table.notes)]
    return [
        ("What was found", [markdown_text(text) for text in overview.sentences(arms)]),
        ("Results", [RESULTS_CAPTION, *tables]),
        *_limits(arms),
        ("Where the numbers come from", [to_markdown(grid) for grid in provenance_grids(runs_of_arms(arms))]),
    ]


def _limits(arms: Sequence[Arm]) -> list[tuple[str, list[str]]]:
    """Return the section on what the runs are too small to show; none if there is nothing to say."""
    items = [f"- {markdown_text(text)}" for text in limits(arms)]
    return [("What this is too small to show", ["\n".join(items)])] if items else []


def _study(sheet: Sheet) -> list[str]:
    section = study_section(sheet)
    commands = ["To measure what is missing:", "\n".join(f"    {command}" for command in section.missing_commands)]
    return [
        f"{section.study.source}. Ours: {section.measure}, mean ± sample standard deviation over seeds. After it stand "
        "the paper's number, and the difference: ours minus the paper's.",
        *(markdown_text(text) for text in section.sentences),
        to_markdown(section.grid),
        *(commands if section.missing_commands else []),
        to_markdown(section.directions),
    ]


def _result_grid(table: ResultTable) -> Grid:
    """Return accuracies and seeds of the trained and untrained encoders and of the floors below them, without notes."""
    head = ["encoder", "seeds", *(f"{label}, {method}" for label in table.labels for method in ("linear", "kNN"))]
    rows = []
    arm = ""
    for row in table.rows:
        if row.kind == "arm":
            arm = row.title
        title = f"{arm}, untrained" if row.kind == "untrained" else row.title
        rows.append([title, row.seeds, *(cell.accuracy for cell in row.cells)])
    return Grid(head, rows)


def to_markdown(grid: Grid) -> str:
    """Return a table that GitHub and pandoc can read."""
    lines = [grid.head, ["---" for _ in grid.head], *grid.rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def markdown_text(text: str) -> str:
    """Return Markdown, on one line, that shows `text` as it is."""
    return " ".join(_SPECIAL.sub(r"\\\g<0>", text).split())


def _cell(text: str | None) -> str:
    return "*not measured*" if text is None else markdown_text(text)
