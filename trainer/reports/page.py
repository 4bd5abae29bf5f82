"""The report as one HTML page without network or other files. Equal input gives equal bytes.

A page of few runs has no script. On a page of many, `report.js` filters and sorts the tables, and the page's own policy
lets the browser run nothing else. `templates/` holds the words and the structure, `report.css` the style. The templates
escape every text that they get, so a name from a config or a manifest cannot become markup.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from data_pipeline.core.sample import BASE, OVERLAY
from trainer.reports import overview
from trainer.reports.curves import charts, color_of
from trainer.reports.findings import limits, samples_of, verdict
from trainer.reports.protocols import by_protocol, label_titles
from trainer.reports.rises import rise_grid, rise_notes
from trainer.reports.runs import NO_NUMBER, Arm, Run, labels_of, runs_of_arms
from trainer.reports.study_sheet import Sheet
from trainer.reports.study_tables import study_section
from trainer.reports.sweeps import sweep_sections
from trainer.reports.tables import (
    CODE_FACTS,
    Grid,
    commands_for_missing_probes,
    differences,
    provenance_grids,
    results,
    speed_grid,
    speed_notes,
)

MOST_NAMES = 4  # that stand under the title; the tables have all
MOST_COMPARED = 8  # configurations in a sentence each; of more, only the best is named
MOST_COMMANDS = 10  # that fill gaps, on a page of many runs
STYLE, SCRIPT = (Path(__file__).with_name(name) for name in ("report.css", "report.js"))


def page(arms: Sequence[Arm], sheet: Sheet | None = None) -> str:
    """Return the whole page. `arms` keep their order; `sheet` is the published table to compare them with."""
    if overview.is_large(arms):
        return _page_of_many(arms, sheet)
    runs = runs_of_arms(arms)
    labels = labels_of(runs)
    with_data = [arm for group in by_protocol(arms) for arm in group.arms]
    return _render(
        "page.html",
        arms,
        sheet,
        verdict=overview.sentences(arms) if len(arms) > MOST_COMPARED else verdict(arms),
        contents=CONTENTS[samples_of(runs)],
        label_titles=label_titles(arms),
        has_usual_labels=not labels or not {BASE, OVERLAY}.isdisjoint(labels),
        other_labels=[label for label in labels if label not in (BASE, OVERLAY)],
        results=results(arms),
        commands_for_missing_probes=commands_for_missing_probes(arms),
        charts=charts(arms),
        rises=rise_grid(arms),
        rise_notes=rise_notes(arms),
        legend=[(arm.name, color_of(number)) for number, arm in enumerate(arms)],
        has_untrained=any(arm.untrained(space) for arm in with_data for space in labels),
        has_seeds=any(len(arm.runs) > 1 for arm in arms),
        analyses=_analyses(runs),
        speed=speed_grid(arms),
        speed_notes=speed_notes(arms),
        differences=differences(arms),
    )


def _page_of_many(arms: Sequence[Arm], sheet: Sheet | None) -> str:
    """Return the page of so many runs that none has a section of its own: tables to filter and sort."""
    script = SCRIPT.read_text(encoding="utf-8")
    tables = overview.tables(arms)
    digest = hashlib.sha256(script.encode()).digest()
    return _render(
        "overview.html",
        arms,
        sheet,
        script=Markup(script),
        script_hash=f"sha256-{base64.b64encode(digest).decode()}",
        verdict=overview.sentences(arms),
        tables=tables,
        commands_for_missing_probes=commands_for_missing_probes(arms)[:MOST_COMMANDS],
        charts=overview.charts(arms),
        views=overview.shown_views(arms, tables),
    )


def _render(template: str, arms: Sequence[Arm], sheet: Sheet | None, **content: Any) -> str:
    """Return a page of `content`, and of what every page has."""
    runs = runs_of_arms(arms)
    return (
        _templates()
        .get_template(template)
        .render(
            css=Markup(STYLE.read_text(encoding="utf-8")),
            title=title_of(arms, sheet),
            subtitle=_subtitle(arms),
            section=None if sheet is None else study_section(sheet),
            what_probes_read=what_probes_read(runs),
            sweeps=sweep_sections(arms),
            limits=limits(arms),
            loss_notes=_loss_notes(runs),
            describe_views=describe_views,
            provenance=provenance_grids(runs),
            code_facts=CODE_FACTS,
            arms=arms,
            runs=runs,
            **content,
        )
    )


@functools.cache  # it compiles each template once
def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("trainer.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["base64"] = lambda content: base64.b64encode(content).decode()
    templates.filters["unbroken"] = unbroken
    templates.filters["last_part"] = lambda key: key.removesuffix(".kind").rpartition(".")[2]
    return templates


def unbroken(text: str) -> str:
    """Return the text with no-break spaces between a number and its unit or its deviation."""
    return re.sub(r"(?<=\S) (?=%)|(?<=\d) (?=±)|(?<=±) (?=\d)", "\u00a0", text)


def title_of(arms: Sequence[Arm], sheet: Sheet | None) -> str:
    if sheet is not None:
        return sheet.study.title + (" (CPU scale)" if sheet.study.is_small else "")
    runs = runs_of_arms(arms)
    return f"Comparison of {len(runs)} runs" if len(runs) > 1 else f"Run {runs[0].name}"


# The content of a sample for each label, by kind of sample.
CONTENTS = {
    "pictures": {"sample": "picture", "base": "a photo", "overlay": "if one was drawn, an object"},
    "sounds": {"sample": "sound", "base": "speech", "overlay": "if one was mixed in, a background"},
    "samples": {"sample": "sample", "base": "its own content", "overlay": "if something was added, that too"},
}


def _subtitle(arms: Sequence[Arm]) -> str:
    every = [arm for group in by_protocol(arms) for arm in group.arms]
    labels = labels_of(runs_of_arms(arms))
    probes = [one for arm in every for space in labels for one in [*arm.trained(space), *arm.untrained(space)]]
    names, titles = list(dict.fromkeys(arm.name for arm in arms)), label_titles(arms)
    num_runs = sum(len(arm.runs) for arm in arms)
    is_short = len(names) <= MOST_NAMES
    parts = [", ".join(names) if is_short else f"{len(names)} configurations, {num_runs} runs"]
    for space in labels:
        sizes = sorted({len(probe.class_names) for probe in probes if probe.label == space})
        if sizes:
            parts.append(f"{titles[space]} of {' or '.join(map(str, sizes))} classes")
    sizes_of_data = sorted({(probe.num_train, probe.num_test) for probe in probes})
    samples = samples_of(runs_of_arms(arms))
    parts += [f"probes of {num_train:,} train and {num_test:,} test {samples}" for num_train, num_test in sizes_of_data]
    return " · ".join(parts)


def _loss_notes(runs: Sequence[Run]) -> list[str]:
    """Return the notes that readers of the losses need, each once, in order."""
    notes = (run.config.objective.note(global_batch_size=run.config.global_batch_size) for run in runs)
    return list(dict.fromkeys(note for note in notes if note is not None))


def what_probes_read(runs: Sequence[Run]) -> str:
    """Return which features the linear probes of the runs read, with the names of runs that differ."""
    pooled = [run.name for run in runs if run.config.encoder.probe_reads == "pooled"]
    if len(pooled) == len(runs):
        return "the pooled features"
    of_some = f" (of {', '.join(dict.fromkeys(pooled))}: the pooled features)" if pooled else ""
    return f"the flattened map before pooling{of_some}"


def describe_views(run: Run) -> str:
    """Return the caption of a grid of views: how much they change, and on which pixels. The run must have a result."""
    result = run.views.result
    assert result is not None
    samples = samples_of([run])
    number = NO_NUMBER if result.change is None else f"{result.change:.4f}"
    change = (
        f"Mean change of a pixel: {number} of the range from black to white"
        if samples == "pictures"
        else f"Mean change of a point of the normalised spectrogram: {number}"
    )
    sentences = [f"{change}, over {result.num_pictures:,} test {samples}."]
    if result.selectivity_box is not None and result.selectivity_object is not None:
        sentences.append(
            f"Divided by that, the change is {result.selectivity_object:.2f} on the drawn pixels and "
            f"{result.selectivity_box:.2f} in the box around them; 1 means no preference."
        )
    if result.views == "expert_image":
        sentences.append("Views that crop and flip also move pixels, which counts as change.")
    sentences.append(f"Differences are drawn × {result.difference_gain} around middle grey.")
    return " ".join(sentences)


def _analyses(runs: Sequence[Run]) -> list[tuple[str, bytes, Grid]]:
    """Return title, PNG and numbers of each analysis except the views. Runs with the same picture share one entry."""
    shown: dict[tuple[str, bytes], list[Run]] = {}
    for run in runs:
        for picture in run.pictures:
            shown.setdefault((picture.name, picture.png), []).append(run)
    found = []
    for (name, png), sharing in shown.items():
        numbers = next(picture.numbers for picture in sharing[0].pictures if picture.name == name)
        title = f"{name.replace('_', ' ')}: {', '.join(run.name for run in sharing)}"
        found.append((title, png, Grid(["number", "value"], list(numbers.items()))))
    return found
