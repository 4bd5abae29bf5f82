"""Put runs into the cells of a published table. `published/` holds the tables: cell, run, number.

Each study of configs/studies.py has a table of the same name. The runs of its small form, NAME_small, have the same
names with the ending "-small", and fill the same cells. Guarantee: a difference from a published level is shown only
for runs that are trained as the paper's.
"""

from __future__ import annotations

import csv
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from data_pipeline.core.errors import UserError, nearest
from data_pipeline.core.imports import import_object
from data_pipeline.core.schema import differing_keys
from trainer.config import RunConfig
from trainer.probes.features import LabelSpace
from trainer.reports.charts import rank_scatter
from trainer.reports.comparison import by_seed, last_rows
from trainer.reports.config_identity import identity_settings
from trainer.reports.page import Table, accuracy, points, templates
from trainer.reports.paired import LEVEL, Reading, difference_of, mean_of
from trainer.reports.runs import Run
from trainer.reports.suppression import BENCHMARK, NONE, suppression_page
from trainer.reports.table import FEATURES, Measurement
from trainer.run_dir import RunDir, write_atomically

SMALL_STUDY, SMALL_RUN = "_small", "-small"
# Settings that change results by rounding alone, or the order in which shards are read.
_FREE = (
    "compile",
    "cudnn_benchmark",
    "engine",
    "precision",
    "max_skipped_in_a_row",
    "memory.encoder_checkpointing",
    "memory.viewmaker_checkpointing",
    "objective.chunk_size",
    "data.shuffle_shards",
    "data.max_bad_share",
    "probe",  # the protocol of the results is shown
)


@dataclass(frozen=True)
class Study:
    """A published table: its lines in `published/`, by the names of their columns.

    about: title, source, row_title, `measure`, which is "linear" (the probe after its last epoch) or "knn_best" (the
        best vote of all checkpoints), and `num_train`, the train samples of the paper.
    cells: row, group, column, label, the run that fills the cell, and mean and deviation, empty without a number.
    differences: label, first run, second run, and points ("+" or "-" if only the sign is known, empty
        if nothing is).
    """

    name: str
    about: Mapping[str, str]
    cells: Sequence[Mapping[str, str]]
    differences: Sequence[Mapping[str, str]]


def recipes(name: str) -> dict[str, RunConfig]:
    """Return the configs of the runs of a study by name. Imported by path, because configs/ imports this package."""
    runs: list[RunConfig] = import_object(f"configs.studies:{name}")()
    return {run.name: run for run in runs}


def read_published(name: str) -> list[dict[str, str]]:
    """Return the lines of a table in `published/` by the names of their columns."""
    text = files("trainer.reports").joinpath(f"published/{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def study(name: str) -> Study:
    """Return the study of that name, with or without "studies:". Raises `UserError` with the nearest name."""
    name = name.removeprefix("studies:")
    full = name.removesuffix(SMALL_STUDY)
    full = full.removesuffix("_as_code").removesuffix("_as_paper")  # other settings, the same table
    lines = {line["study"]: line for line in read_published("studies")}
    if full not in lines:
        known = [form for one in lines for form in (one, one + SMALL_STUDY)]
        raise UserError(f'there is no study "{name}"{nearest(name, known)}')
    ending = SMALL_RUN if name.endswith(SMALL_STUDY) else ""
    runs = recipes(name)  # the small form of a large table lacks some

    def of_study(table: str, *columns: str) -> list[dict[str, str]]:
        """Return the lines of the study in a table whose runs, in these columns, it has."""
        of_all = [line for line in read_published(table) if line["study"] == full]
        named = [line | {column: line[column] + ending for column in columns} for line in of_all]
        return [line for line in named if all(line[column] in runs for column in columns)]

    return Study(name, lines[full], of_study("cells", "run"), of_study("differences", "first", "second"))


def write_study(
    name: str,
    paths: Sequence[Path],
    runs: Sequence[Run],
    rows: Sequence[Measurement],
    out: Path,
    problems: Sequence[str],
) -> None:
    """Write the page of a study as Markdown, and its pictures into a directory beside it with the name of the page.

    paths: the run directories as they were typed, or a table.
    """
    found = list(dict.fromkeys([*problems, *(problem for run in runs for problem in run.problems)]))
    shared: dict[str, Any] = {
        "study": name,
        "paths": shlex.join(map(str, paths)),
        "problems": found,
        "origin": origin(rows),
    }
    if name.removeprefix("studies:").startswith(BENCHMARK):
        page, pictures = suppression_page(rows, published=read_published("suppression"))
        for picture, png in pictures.items():
            write_atomically(out.with_suffix("") / f"{picture}.png", png)
        text = templates().get_template("suppression.md").render(shared | page, directory=out.stem)
    else:
        chosen = study(name)
        tables = study_tables(chosen, runs, rows)
        shared["picture"] = None
        if scatter := concentration_picture(chosen, runs, rows):
            shared["picture"] = f"{out.stem}/concentration.png"
            write_atomically(out.parent / shared["picture"], scatter)
        text = templates().get_template("study.md").render({**chosen.about, **shared}, tables=tables)
    write_atomically(out, text)


def origin(rows: Sequence[Measurement]) -> dict[str, str]:
    """Return where the numbers of a table come from, in words."""

    def joined(values: Sequence[object]) -> str:
        return ", ".join(sorted({str(value) for value in values if value not in ("", None)}))

    return {
        "runs": str(len({row.run for row in rows})),
        "seeds": joined([row.seed for row in rows]),
        "commits": joined([row.commit for row in rows]),
        "hardware": joined([row.hardware for row in rows]),
        "protocols": joined([row.protocol for row in rows if not row.readout.startswith("online")]),
    }


def study_tables(study: Study, runs: Sequence[Run], rows: Sequence[Measurement]) -> list[Table]:
    """Return the tables of each protocol: our numbers beside the paper's, and the published differences beside ours.

    Raises `UserError` if two different configurations could fill a cell.
    """
    named = {run.name: run.config.name for run in runs} | {row.run: row.encoder for row in rows if not runs}
    rows = _of_study(study, rows, named)
    _check_namesakes(rows, named)
    unlike = _unlike(study, runs)
    protocols = Counter(row.protocol for row in rows if not row.readout.startswith("online"))
    tables = []
    for protocol in [one for one, _ in protocols.most_common()] or ["online"]:
        of_protocol = [row for row in rows if row.protocol in (protocol, "online")]
        readings = _readings(study, of_protocol, named)
        tables.append(Table(protocol, *_cells(study, readings, unlike)))
        tables.append(Table("Differences", *_differences(study, readings)))
    return tables


def concentration_picture(study: Study, runs: Sequence[Run], rows: Sequence[Measurement]) -> bytes | None:
    """Draw the errors of transforms over 1 - sigma, as in Huang et al. (2023).

    None if no run has the analysis `concentration`, or if it has measured less than three of the study's rows.
    """
    measured = next((run for run in runs if any(one.name == "concentration" for one in run.pictures)), None)
    places = {cell["run"]: (cell["group"], cell["column"]) for cell in study.cells}
    if measured is None or measured.config.name not in places:
        return None
    sets = json.loads((RunDir(measured.path).analysis / "concentration.json").read_text(encoding="utf-8"))["sets"]
    named = {run.name: run.config.name for run in runs}
    readings = _readings(study, _of_study(study, rows, named), named)
    panels: dict[str, dict[str, tuple[float, float]]] = {}
    for cell in study.cells:
        of_seeds = readings.get((cell["label"], cell["run"]))
        if of_seeds and places[cell["run"]] == places[measured.config.name]:
            error = 100 * (1 - mean_of(list(of_seeds.values())).mean)
            for one in sets.get(cell["row"], ()):
                panels.setdefault(f"delta {one['delta']:g}", {})[cell["row"]] = (one["outside"], error)
    if not panels or len(next(iter(panels.values()))) < 3:
        return None
    return rank_scatter(panels, x_label="1 - sigma", y_label="error, %")


def _of_study(study: Study, rows: Sequence[Measurement], named: Mapping[str, str]) -> list[Measurement]:
    wanted = {cell["run"] for cell in study.cells}
    return [row for row in rows if named.get(row.run) in wanted and row.reads == FEATURES]


def _check_namesakes(rows: Sequence[Measurement], named: Mapping[str, str]) -> None:
    encoders: dict[str, set[tuple[str, str]]] = {}
    for row in rows:
        encoders.setdefault(named[row.run], set()).add((row.encoder, row.data))
    for name, found in encoders.items():
        if len(found) > 1:
            others = ", ".join(sorted({row.run for row in rows if named[row.run] == name}))
            raise UserError(f"the runs called {name} differ in more than the seed ({others}); leave the others out")


_Readings = Mapping[tuple[LabelSpace, str], Mapping[int, Reading]]


def _readings(study: Study, rows: Sequence[Measurement], named: Mapping[str, str]) -> _Readings:
    """Return the accuracies that the paper would report by label and run, for each seed."""
    found: dict[tuple[LabelSpace, str], dict[int, Reading]] = {}
    groups: dict[tuple[LabelSpace, str], list[Measurement]] = {}
    for row in rows:
        groups.setdefault((row.label, named[row.run]), []).append(row)
    for key, of_key in groups.items():
        if study.about["measure"] == "linear":
            found[key] = by_seed(last_rows(row for row in of_key if not row.readout.startswith("online")))
            continue
        votes = [row for row in of_key if row.readout in ("knn", "online_knn") and row.step > 0]
        whole = max(((row.num_train or 0, row.num_samples) for row in votes), default=None)
        best: dict[int, Reading] = {}
        for row in sorted(votes, key=lambda row: row.value):
            if (row.num_train or 0, row.num_samples) == whole:  # a vote on some of the samples does not count
                best[row.seed] = Reading(row.value, row.num_samples)
        found[key] = best
    return found


def _unlike(study: Study, runs: Sequence[Run]) -> dict[str, str]:
    """Return how the runs of each name differ from the paper's, in words; "" if their levels may be compared."""
    if study.name.endswith(SMALL_STUDY):
        return {cell["run"]: "of the small form" for cell in study.cells}
    of_paper, found, num_train = recipes(study.name), dict[str, str](), int(study.about["num_train"])
    for run in runs:
        if (recipe := of_paper.get(run.config.name)) is not None:
            parts = differing_keys(_settings(run.config), _settings(recipe))
            sizes = {result.num_train for result in run.results if result.num_train != num_train}
            parts += [f"{size:,} train samples" for size in sorted(sizes)]
            parts += [] if run.finished_step is not None else ["not ended"]
            found[run.config.name] = found.get(run.config.name, "") or ", ".join(parts)
    return found


def _settings(config: RunConfig) -> dict[str, Any]:
    free = tuple(f"{name}." for name in _FREE)
    return {key: value for key, value in identity_settings(config).items() if not f"{key}.".startswith(free)}


def _cells(study: Study, readings: _Readings, unlike: Mapping[str, str]) -> tuple[list[str], list[list[str]]]:
    columns = list(dict.fromkeys((cell["group"], cell["column"]) for cell in study.cells))
    by_place = {(cell["row"], cell["group"], cell["column"]): cell for cell in study.cells}
    head = [study.about["row_title"], *(f"{group}: {column}" for group, column in columns)]
    rows = []
    for row in dict.fromkeys(cell["row"] for cell in study.cells):
        cells = [by_place.get((row, *column)) for column in columns]
        rows.append([row, *("" if cell is None else _shown(cell, readings, unlike) for cell in cells)])
    return head, rows


def _shown(cell: Mapping[str, str], readings: _Readings, unlike: Mapping[str, str]) -> str:
    """Return "ours (paper's)", and the difference if the run is like the paper's."""
    ours = readings.get((cell["label"], cell["run"]), {})
    mean = mean_of(list(ours.values())) if ours else None
    text = NONE if mean is None else accuracy(mean)
    if not cell["mean"]:
        return text
    published = " ± ".join(f"{float(number):g}" for number in (cell["mean"], cell["deviation"]) if number)
    if mean is None or unlike.get(cell["run"], "unknown"):
        return f"{text} ({published})"
    return f"{text} ({published}; {100 * mean.mean - float(cell['mean']):+.1f})".replace("-", "−")


def _differences(study: Study, readings: _Readings) -> tuple[list[str], list[list[str]]]:
    rows = []
    for one in study.differences:
        label, first, second, published = (one[name] for name in ("label", "first", "second", "points"))
        a, b = readings.get((label, first), {}), readings.get((label, second), {})
        ours = difference_of(a, b)
        if ours is None:
            outcome = "not measured"
        elif ours.p >= LEVEL:
            outcome = "not told from chance"
        elif not published:
            outcome = "told from chance"
        else:
            outcome = "same" if (ours.mean > 0) != published.startswith("-") else "opposite"
        paper = published if published in "+-" else f"{float(published):+.1f}".replace("-", "−")
        rows.append([f"{first} − {second}, {label}", paper, NONE if ours is None else points(ours), outcome])
    return ["difference in points", "paper", "ours", "direction"], rows
