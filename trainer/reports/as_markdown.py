"""The report as Markdown: the same sentences and tables without pictures, for a paper's appendix or a W&B report."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.reports.findings import limits, verdict
from trainer.reports.grid import markdown_text, to_markdown
from trainer.reports.page import title_of
from trainer.reports.runs import Arm
from trainer.reports.study_sheet import Sheet, missing_commands, summary
from trainer.reports.study_tables import MEASURES, direction_grid, study_grid
from trainer.reports.tables import difference_grid, provenance_grids, result_grids, speed_grid

RESULTS_CAPTION = (
    "Test accuracy in %: linear probe on the frozen encoder after its last epoch, and weighted kNN vote; mean ± sample "
    "standard deviation over seeds."
)


def as_markdown(arms: Sequence[Arm], sheet: Sheet | None = None) -> str:
    """The whole text; equal input gives equal text."""
    parts = [f"# {markdown_text(title_of(arms, sheet))}"]
    for title, body in sections(arms, sheet):
        parts += [f"## {title}", *body]
    return "\n\n".join(parts) + "\n"


def sections(arms: Sequence[Arm], sheet: Sheet | None = None) -> list[tuple[str, list[str]]]:
    """Titles and the paragraphs, lists and tables below each."""
    runs = [run for arm in arms for run in arm.runs]
    found = [] if sheet is None else [("Against the paper", _study(sheet))]
    found.append(("What was found", [markdown_text(text) for text in verdict(arms)]))
    results = []
    grids = result_grids(arms)
    for name, grid in grids:
        results += ([f"**{markdown_text(name)}**"] if name else []) + [to_markdown(grid)]
    found.append(("Results", [RESULTS_CAPTION, *results]))
    found.append(("What this is too small to show", ["\n".join(f"- {markdown_text(text)}" for text in limits(arms))]))
    found.append(("Speed and memory", [to_markdown(speed_grid(arms))]))
    differing = difference_grid(arms)
    found.append(("Differences between the configs", [to_markdown(differing) if differing.rows else "None."]))
    found.append(("Where the numbers come from", [to_markdown(grid) for grid in provenance_grids(runs)]))
    return found


def _study(sheet: Sheet) -> list[str]:
    commands = missing_commands(sheet)
    missing = ["To measure what is missing:", "\n".join(f"    {command}" for command in commands)] if commands else []
    return [
        f"{sheet.study.source}. Ours: {MEASURES[sheet.study.measure]}, mean ± sample standard deviation over seeds; "
        "then what the paper has, and ours less the paper's.",
        *(markdown_text(text) for text in summary(sheet)),
        to_markdown(study_grid(sheet)),
        *missing,
        to_markdown(direction_grid(sheet)),
    ]
