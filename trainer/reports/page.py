"""The report as one HTML page without network, scripts or other files. Equal input gives equal bytes.

`templates/` holds the words and the structure, `report.css` the style. The templates escape every text that they get,
so a name from a config or a manifest cannot become markup.
"""

from __future__ import annotations

import base64
import functools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from data_pipeline.core.schema import as_typed, flatten
from trainer.probes.features import LabelSpace, label_order
from trainer.probes.result import ProbeResult
from trainer.provenance import facts_of_starts
from trainer.reports.charts import color_of, curves, sweep_charts
from trainer.reports.comparison import Comparison, Encoder, Score, compare, last_rows
from trainer.reports.paired import Estimate
from trainer.reports.runs import Picture, Run, Scored
from trainer.reports.table import BALANCED, Measurement, encoder_names

CODE = frozenset({"directory", "command", "commit", "train manifest", "test manifest"})
_STYLE = Path(__file__).with_name("report.css")
_TOPS = (0.1, 0.25, 0.5, 1.0)  # ends of the scale of a panel
_MOST_CLASSES = 20  # of a confusion that the page shows
_NOT_COMPARED = ("name", "seed")


@dataclass(frozen=True)
class Confusion:
    """The shares of the test samples of each class (row) that the linear probe of an encoder gives to each class."""

    title: str
    encoder: str
    classes: Sequence[str]
    shares: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Table:
    """A table of text with a title."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def page(
    runs: Sequence[Run],
    rows: Sequence[Measurement],
    problems: Sequence[str] = (),
    scored: Scored | None = None,
) -> str:
    """Return the page of runs and scored encoders, and of their rows of the table.

    `problems` are sentences on what was left out.
    """
    names = encoder_names(runs)
    comparisons = compare(rows)
    probed = {row.run for row in rows if row.step > 0 and not row.readout.startswith("online")}
    axes = list(dict.fromkeys(axis for run in runs for axis in run.config.tracking.axes if axis != "seed"))
    pictures = [(run, picture) for run in runs for picture in run.pictures]
    notes = (run.config.objective.note for run in runs)
    encoders = dict.fromkeys([*names.values(), *(row.encoder for row in rows)])
    return (
        templates()
        .get_template("page.html")
        .render(
            css=Markup(_STYLE.read_text(encoding="utf-8")),
            title=title_of(runs),
            comparisons=comparisons,
            colors={name: color_of(number) for number, name in enumerate(encoders)},
            without_probes=[run.name for run in runs if run.name not in probed],
            problems=list(dict.fromkeys([*problems, *(problem for run in runs for problem in run.problems)])),
            sweeps=sweep_charts(rows, axes),
            views=_views(pictures, names),
            confusions=confusions(runs, names),
            balanced=_balanced(rows),
            curves=curves(runs, rows, names),
            loss_notes=list(dict.fromkeys(note for note in notes if note is not None)),
            analyses=_analyses(pictures),
            differences=differences(runs),
            provenance=provenance(runs) + _provenance_of_scored(scored or {}),
            code=CODE,
        )
        .replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
    )


def title_of(runs: Sequence[Run]) -> str:
    if not runs:
        return "Scored encoders"
    return f"Comparison of {len(runs)} runs" if len(runs) > 1 else f"Run {runs[0].name}"


@functools.cache  # it compiles each template once
def templates() -> Environment:
    """Return the templates of pages; only those of HTML escape what they get."""
    found = Environment(
        loader=PackageLoader("trainer.reports"),
        autoescape=lambda name: name is not None and name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters |= {
        "accuracy": accuracy,
        "any_score": _any_score,
        "base64": lambda content: base64.b64encode(content).decode(),
        "cell": _cell,
        "encoder_named": lambda comparison, name: next(one for one in comparison.encoders if one.name == name),
        "interval": lambda estimate: accuracy(estimate).removeprefix(percent(estimate.mean)),
        "percent": percent,
        "place": _place,
        "points": points,
        "span": _span,
        "top_of": _top_of,
        "worst_groups": _worst_groups,
    }
    return found


def _cell(text: object) -> str:
    """Return a text for a cell of a table in Markdown, in which nothing is markup."""
    shown = "not measured" if text is None else " ".join(str(text).split())
    return re.sub(r"([|`*_<\[\\])", r"\\\1", shown)


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def accuracy(estimate: Estimate) -> str:
    """Return an accuracy in per cent with half of its 95 % interval."""
    if not math.isfinite(estimate.half_width):
        return percent(estimate.mean)
    return f"{percent(estimate.mean)} ± {percent(min(estimate.half_width, 1.0))}"


def points(lead: Estimate) -> str:
    """Return a difference of accuracies in percentage points, with half of its 95 % interval.

    Examples:
        >>> points(Estimate(-0.0125, 0.0, 1.0, 2))
        '−1.2 ± 0.0'
    """
    return accuracy(lead).replace("-", "−")


def _top_of(comparison: Comparison) -> float:
    """Return the end of the scale of the panels, in [0, 1]."""
    scores = [score for one in comparison.encoders for of in (one.trained, one.untrained) for score in of.values()]
    highest = [score.estimate.mean + min(score.estimate.half_width, 1.0) for score in scores]
    highest += [column.chance for column in comparison.columns]
    return next((top for top in _TOPS if max(highest) <= top), 1.0)


def _place(share: float, top: float) -> str:
    return f"{100 * min(max(share / top, 0.0), 1.0):.2f}%"


def _span(estimate: Estimate, top: float) -> str:
    half = min(estimate.half_width, 1.0)
    low, high = (min(max((estimate.mean + sign * half) / top, 0.0), 1.0) for sign in (-1, 1))
    return f"left:{100 * low:.2f}%;width:{100 * (high - low):.2f}%"


def _any_score(encoder: Encoder) -> Score | None:
    return next(iter([*encoder.trained.values(), *encoder.untrained.values()]), None)


def _worst_groups(comparison: Comparison) -> list[list[str]]:
    titles = {column.label: column.title for column in comparison.columns}
    return [
        [encoder.name, titles[label], accuracy(worst.estimate), worst.group, str(worst.num_samples)]
        for encoder in comparison.encoders
        for label, worst in encoder.worst.items()
    ]


def confusions(runs: Sequence[Run], names: Mapping[str, str]) -> list[Confusion]:
    """Return the confusions of labels with few classes, at the last step of each run, over the seeds of an encoder."""
    found: dict[tuple[LabelSpace, str], dict[str, ProbeResult]] = {}
    for run in runs:
        last = max((result.checkpoint_step for result in run.results), default=0)
        for result in run.results:
            if result.checkpoint_step == last > 0 and 0 < len(result.class_names) <= _MOST_CLASSES:
                found.setdefault((result.label, names[run.name]), {}).setdefault(run.name, result)
    tables, labels = [], label_order(label for label, _ in found)
    for (label, encoder), results in sorted(found.items(), key=lambda one: labels.index(one[0][0])):
        first = next(iter(results.values()))
        num_KK = np.zeros([len(first.class_names)] * 2)
        for result in results.values():
            for right, given, num in result.confusion.get("linear", ()):
                num_KK[right, given] += num
        if num_KK.any():
            shares_KK = num_KK / np.maximum(num_KK.sum(1, keepdims=True), 1)
            tables.append(Confusion(first.title or f"{label} label", encoder, first.class_names, shares_KK.tolist()))
    return tables


def _balanced(rows: Sequence[Measurement]) -> list[list[str]]:
    """Return encoder, label and mean over seeds of each balanced accuracy of a trained encoder, in %."""
    values: dict[tuple[str, str], list[float]] = {}
    for row in last_rows(rows):
        if row.readout == BALANCED:
            values.setdefault((row.encoder, row.title or f"{row.label} label"), []).append(row.value)
    return [[*place, percent(statistics.fmean(of_seeds))] for place, of_seeds in values.items()]


def _views(pictures: Sequence[tuple[Run, Picture]], names: Mapping[str, str]) -> list[tuple[Run, Picture]]:
    """Return the views of the first seed of each encoder."""
    first: dict[str, tuple[Run, Picture]] = {}
    for run, picture in pictures:
        if picture.name == "views":
            first.setdefault(names[run.name], (run, picture))
    return list(first.values())


def _analyses(pictures: Sequence[tuple[Run, Picture]]) -> list[tuple[str, Picture]]:
    """Return title and picture of each analysis except the views. Runs with the same picture share one entry."""
    shown: dict[tuple[str, bytes], list[tuple[Run, Picture]]] = {}
    for run, picture in pictures:
        if picture.name != "views":
            shown.setdefault((picture.name, picture.png), []).append((run, picture))
    return [
        (f"{name.replace('_', ' ')}: {', '.join(run.name for run, _ in sharing)}", sharing[0][1])
        for (name, _), sharing in shown.items()
    ]


def differences(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Return a table of the settings that differ between encoders; with more encoders than settings, a row for each.

    A section that some configs have other settings in is one row.
    """
    names = encoder_names(runs)
    flat = {run.name: {key: as_typed(value) for key, value in flatten(run.config).items()} for run in runs}
    keys = [key for key in dict.fromkeys(key for one in flat.values() for key in one) if key not in _NOT_COMPARED]
    differing = [key for key in keys if len({one.get(key) for one in flat.values()}) > 1]
    sections = {key.partition(".")[0] for key in differing if not all(key in one for one in flat.values())}
    groups: dict[str, list[str]] = {}
    for key in differing:
        section = key.partition(".")[0]
        groups.setdefault(section if section in sections else key, []).append(key)
    rows = []
    for title, group in groups.items():
        texts: dict[str, dict[str, None]] = {}
        for run in runs:
            values = {key.removeprefix(f"{title}."): flat[run.name][key] for key in group if key in flat[run.name]}
            text = ", ".join(value if name == title else f"{name} {value}" for name, value in values.items())
            texts.setdefault(names[run.name], {})[text or "–"] = None
        rows.append([title, *(" / ".join(of_encoder) for of_encoder in texts.values())])
    head = ["setting", *dict.fromkeys(names.values())]
    if len(head) > len(rows) + 1 and rows:
        head, *rows = (list(column) for column in zip(*[["encoder", *head[1:]], *rows], strict=True))
    return head, rows


def provenance(runs: Sequence[Run]) -> list[tuple[list[str], list[list[str | None]]]]:
    """Return where the numbers come from: what all runs share, and what differs with a row for each run."""
    facts: dict[str, list[str | None]] = {title: [fact(run) for run in runs] for title, fact in _FACTS.items()}
    shared: list[list[str | None]] = [[title, texts[0]] for title, texts in facts.items() if len(set(texts)) == 1]
    differing = {title: texts for title, texts in facts.items() if len(set(texts)) > 1}
    if not runs:
        return []
    if not differing:
        return [(["", runs[0].name], shared)]
    own = [[run.name, *(texts[number] for texts in differing.values())] for number, run in enumerate(runs)]
    return [(["", "all runs"], shared), (["", *differing], own)]


def _provenance_of_scored(scored: Scored) -> list[tuple[list[str], list[list[str | None]]]]:
    records = {path: results[0].scored for path, results in scored.items()}
    rows: list[list[str | None]] = [
        [one.name, str(path), one.origin.get("command"), _commit(one.origin), one.origin.get("started_at"), one.sha256]
        for path, one in records.items()
        if one is not None
    ]
    return [(["scored encoder", "directory", "command", "commit", "started", "file"], rows)] if rows else []


def _of_starts(text: Callable[[Mapping[str, Any]], Any]) -> Callable[[Run], str | None]:
    """Return what `text` says of each start of a run, without repetitions: "1, then 2"."""

    def fact(run: Run) -> str | None:
        found = [str(one) for start in facts_of_starts(run.provenance) if (one := text(start)) is not None]
        return ", then ".join(dict.fromkeys(found)) or None

    return fact


def _commit(start: Mapping[str, Any]) -> str | None:
    changed = " with uncommitted changes" if start.get("git_diff_sha256") else ""
    return f"{str(start['git_commit'])[:12]}{changed}" if start.get("git_commit") else None


def _processor(run: Run) -> str | None:
    cpu, num = run.provenance.get("cpu"), run.provenance.get("num_cpus")
    return None if cpu is None else f"{cpu}, {num} CPUs" if num else str(cpu)


def _wall_time(run: Run) -> str | None:
    seconds = run.provenance.get("total_wall_seconds")
    if seconds is None:
        return None
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


def _median(metric: str, form: str) -> Callable[[Run], str | None]:
    def fact(run: Run) -> str | None:
        values = run.by_step(metric).values()
        return form.format(statistics.median(values)) if values else None

    return fact


def _versions(run: Run) -> str | None:
    versions = run.provenance.get("versions")
    return ", ".join(f"{name} {one}" for name, one in versions.items()) if versions else None


def _manifest(name: str) -> Callable[[Run], str | None]:
    """Return the hash of the present manifest, and earlier hashes if the data were replaced."""

    def fact(run: Run) -> str | None:
        now, starts = run.provenance.get(name), run.provenance.get("starts", ())
        earlier = dict.fromkeys(start[name][:12] for start in starts if start.get(name) not in {None, now})
        replaced = f" (in place of {', '.join(earlier)})" if earlier else ""
        return str(now)[:12] + replaced if now else None

    return fact


def _first_weights(run: Run) -> str:
    """Return the weights of the untrained encoder."""
    encoder = run.config.encoder
    return "drawn" if encoder.weights is None else f"{encoder.weights} (hash {str(encoder.weights_sha256)[:12]})"


_FACTS: Mapping[str, Callable[[Run], str | None]] = {
    "directory": lambda run: str(run.path),
    "command": _of_starts(lambda start: start.get("command")),
    "commit": _of_starts(_commit),
    "seed": lambda run: str(run.config.seed),
    "weights of the untrained encoder": _first_weights,
    "started": lambda run: run.provenance.get("started_at"),
    "processor": _processor,
    "GPU": lambda run: run.provenance.get("gpu") or ("none" if "gpu" in run.provenance else None),
    "ranks": _of_starts(lambda start: start.get("world_size")),
    "wall time": _wall_time,
    "samples a second": _median("perf/samples_per_second", "{:,.0f}"),
    "waiting for data": _median("perf/data_wait_fraction", "{:.1%} of the time"),
    "train manifest": _manifest("train_manifest_sha256"),
    "test manifest": _manifest("test_manifest_sha256"),
    "versions": _versions,
}
