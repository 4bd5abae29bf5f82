"""The tables of the report as HTML: accuracies, differences between configs, provenance."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from trainer.probes.features import LABEL_SPACES, LabelSpace
from trainer.reports.curves import COLORS
from trainer.reports.findings import Method, Score, baseline, score, winner
from trainer.reports.grid import NOT_MEASURED, Grid, columns, prose, scroll, to_html
from trainer.reports.protocols import Reading, describe_protocol, label_titles, probe_command, readings
from trainer.reports.runs import Arm, Dataset, Run, config_differences, datasets_of


def results(arms: Sequence[Arm]) -> str:
    """Return a table for each protocol of the probe and each dataset: only accuracies that compare stand together."""
    parts = []
    for reading in readings(arms):
        datasets = datasets_of(reading.arms)
        for dataset in datasets:
            title = " · ".join(part for part in (reading.title, dataset.name if len(datasets) > 1 else "") if part)
            parts.append(f"<h3>{escape(title[:1].upper() + title[1:])}</h3>" if title else "")
            parts.append(_results_of(dataset))
        if any(_measured_spaces(reading.arms)):
            caption = RESULTS_CAPTION.format(protocol=describe_protocol(reading.protocol))
            parts.append(f"<p class='caption'>{prose(caption)}</p>")
    return "".join(parts) + _missing_probes(readings(arms)[0])


RESULTS_CAPTION = (
    "Test accuracy in %. Linear: softmax regression on the flattened pre-pool map of the frozen encoder, fitted for "
    "{protocol} (for the untrained encoder, with the untrained policy), after its last epoch; below it the gain over "
    "the untrained encoder in points, and the best epoch, which was chosen by its test accuracy and is therefore "
    "optimistic. Bold: above every other encoder by more than two standard errors of the difference. kNN: weighted "
    "vote of the nearest train samples by the cosine of pooled features. ± is the sample standard deviation over seeds."
)


def _measured_spaces(arms: Sequence[Arm]) -> list[LabelSpace]:
    return [space for space in LABEL_SPACES if any(arm.trained(space) or arm.untrained(space) for arm in arms)]


def _results_of(dataset: Dataset) -> str:
    arms = dataset.arms
    spaces, titles = _measured_spaces(arms), label_titles(arms)
    if not spaces:
        return "<p>Nothing has been probed yet.</p>"
    head = "".join(f'<th class="group" colspan="2">{escape(titles[space])}</th>' for space in spaces)
    methods = '<th class="number">linear</th><th class="number">kNN</th>' * len(spaces)
    rows: list[str] = []
    best = {space: winner(arms, space) for space in spaces}
    for number, arm in zip(dataset.numbers, arms, strict=True):
        cells = "".join(_trained_cells(arm, arms, space, is_best=best[space] is arm) for space in spaces)
        rows.append(f'<tr class="arm"><th>{chip(number)}{escape(arm.name)}{_stage(arm)}</th>{cells}</tr>')
        cells = "".join(_untrained_cells(arm, arms, space) for space in spaces)
        rows.append(f'<tr class="untrained"><th>untrained encoder</th>{cells}</tr>')
    for title, attribute in (("commonest class", "majority_share"), ("chance", "chance")):
        cells = ""
        for space in spaces:
            probe = next(probe for arm in arms for probe in [*arm.trained(space), *arm.untrained(space)])
            cells += f'<td class="number">{100 * getattr(probe, attribute):.1f}</td><td></td>'
        rows.append(f'<tr class="floor"><th>{title}</th>{cells}</tr>')
    return scroll(
        f'<table class="wide results columns{2 * len(spaces)}"><thead><tr><th class="corner"></th>{head}</tr>'
        f'<tr><th class="corner"></th>{methods}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def result_grids(arms: Sequence[Arm]) -> list[tuple[str, Grid]]:
    """Return the same tables as text, each with its protocol and dataset; without the best epochs."""
    grids = []
    for reading in readings(arms):
        datasets = datasets_of(reading.arms)
        for dataset in datasets:
            name = dataset.name if len(datasets) > 1 else ""
            grids.append((" · ".join(part for part in (reading.title, name) if part), _result_grid(dataset.arms)))
    return grids


def _result_grid(arms: Sequence[Arm]) -> Grid:
    spaces, titles = _measured_spaces(arms), label_titles(arms)
    methods: tuple[Method, ...] = ("linear", "knn")
    head = ["encoder", "seeds", *(f"{titles[space]}, {_METHODS[method]}" for space in spaces for method in methods)]
    rows: list[list[str | None]] = []
    for arm in arms:
        for name, seeds, probes in (
            (arm.name, ", ".join(str(run.config.seed) for run in arm.runs), {s: arm.trained(s) for s in spaces}),
            (f"{arm.name}, untrained", "", {s: baseline(arm, arms, s) for s in spaces}),
        ):
            scores = [score(probes[space], method) for space in spaces for method in methods]
            rows.append([name, seeds, *(None if one is None else str(one) for one in scores)])
    return columns(head, rows)


_METHODS: Mapping[Method, str] = {"linear": "linear", "knn": "kNN"}


def _trained_cells(arm: Arm, arms: Sequence[Arm], space: LabelSpace, *, is_best: bool) -> str:
    probes = arm.trained(space)
    linear = score(probes, "linear")
    if linear is None:
        return f'<td class="number">{NOT_MEASURED}</td>' * 2
    small = ""
    if untrained := score(baseline(arm, arms, space), "linear"):
        gain = f"{100 * (linear.mean - untrained.mean):+.1f}".replace("-", "−")
        small += f"<small>{gain}</small>"
    if len(probes) == 1:
        result = probes[0].linear
        small += f"<small>best {100 * result.best_accuracy:.1f}, epoch {result.best_epoch}</small>"
    number = f"<strong>{linear}</strong>" if is_best else str(linear)
    return f'<td class="number">{number}{small}</td>{_cell(score(probes, "knn"))}'


def _untrained_cells(arm: Arm, arms: Sequence[Arm], space: LabelSpace) -> str:
    probes = baseline(arm, arms, space)
    return _cell(score(probes, "linear")) + _cell(score(probes, "knn"))


def _cell(value: Score | None) -> str:
    return f'<td class="number">{NOT_MEASURED if value is None else value}</td>'


def _stage(arm: Arm) -> str:
    steps = sorted({probe.checkpoint_step for space in LABEL_SPACES for probe in arm.trained(space)})
    parts = [f"step {', '.join(map(str, steps))}"] if steps else []
    if len(arm.runs) > 1:
        parts.append(f"{len(arm.runs)} runs, seeds {', '.join(str(run.config.seed) for run in arm.runs)}")
    return f' <span class="soft">({"; ".join(parts)})</span>' if parts else ""


def _missing_probes(reading: Reading) -> str:
    """Return the commands that fill the gaps of the first table."""
    commands = []
    for arm in reading.arms:
        for run in arm.runs:
            if not any(run.final_probe(space) for space in LABEL_SPACES):
                commands.append(probe_command(run, reading.protocol))
        if not any(baseline(arm, reading.arms, space) for space in LABEL_SPACES):
            commands.append(probe_command(arm.runs[0], reading.protocol, "--step 0"))
    if not commands:
        return ""
    return f"<p>To measure what is missing:</p><pre>{escape(chr(10).join(commands))}</pre>"


def differences(arms: Sequence[Arm]) -> str:
    """The settings that differ, one column an arm, and every whole config, folded."""
    runs = [run for arm in arms for run in arm.runs]
    if len(runs) == 1:
        return f"<p>One run, so nothing to compare.</p>{_configs(runs)}"
    rows = config_differences(arms)
    if not rows:
        return f"<p>None: all runs have the same config.</p>{_configs(runs)}"
    head = "".join(f"<th>{escape(arm.name)}</th>" for arm in arms)
    body = "".join(
        f"<tr><th><code>{escape(row.key)}</code></th>"
        + "".join(
            f'<td class="settings" data-head="{escape(arm.name)}">{_settings(values)}</td>'
            for arm, values in zip(arms, row.values, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    table = f'<table class="cards"><thead><tr><th>setting</th>{head}</tr></thead><tbody>{body}</tbody></table>'
    return scroll(table) + _configs(runs)


def difference_grid(arms: Sequence[Arm]) -> Grid:
    """The settings that differ, as text."""
    rows = [
        [row.key, *("; ".join(_setting_lines(values)) or "no such setting" for values in row.values)]
        for row in config_differences(arms)
    ]
    return columns(["setting", *(arm.name for arm in arms)], rows)


def _configs(runs: Sequence[Run]) -> str:
    return "".join(
        f"<details><summary>Whole config of {escape(run.name)}</summary>"
        f"<pre>{escape(run.config.model_dump_json(indent=2))}</pre></details>"
        for run in runs
    )


def _settings(values: Mapping[str, Sequence[Any]]) -> str:
    """The value of one setting, or the settings of a section one below the other."""
    if not values:
        return '<span class="none">no such setting</span>'
    return f"<code>{'<br>'.join(map(escape, _setting_lines(values)))}</code>"


def _setting_lines(values: Mapping[str, Sequence[Any]]) -> list[str]:
    shown = {name: " / ".join(map(_plain, distinct)) for name, distinct in values.items()}
    return [f"{name} = {value}" if name else value for name, value in shown.items()]


def _plain(value: Any) -> str:
    """A setting as a user would type it; numbers to six digits."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_plain, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def speed_grid(arms: Sequence[Arm]) -> Grid:
    """How fast each arm trained and what it needed: medians over the logged steps of all its runs."""
    head = ["", "samples a second", "ranks", "waiting for data", "most time goes to", "memory of a rank", "wall time"]
    return columns(head, [[arm.name, *_speed(arm.runs)] for arm in arms])


def _speed(runs: Sequence[Run]) -> list[str | None]:
    stages = {
        name: median
        for name in sorted({key for run in runs for entry in run.metrics for key in entry if _is_stage(key)})
        if (median := _median_of(runs, name)) is not None
    }
    slowest = max(stages, key=lambda name: stages[name], default=None)
    memory = _largest_of(runs, ("memory/gpu_gigabytes", "memory/resident_gigabytes"))
    wall = [seconds for run in runs if isinstance(seconds := run.provenance.get("wall_seconds"), int | float)]
    return [
        _formatted(_median_of(runs, "perf/samples_per_second"), "{:,.0f}"),
        " / ".join(dict.fromkeys(str(size) for run in runs if (size := run.provenance.get("world_size")))) or None,
        _formatted(_median_of(runs, "perf/data_wait_fraction"), "{:.1%}"),
        f"{slowest.removeprefix('perf/').removesuffix('_fraction')} ({stages[slowest]:.0%})" if slowest else None,
        memory,
        _duration(statistics.median(wall)) if wall else None,
    ]


def _is_stage(key: str) -> bool:
    return key.startswith("perf/") and key.endswith("_fraction") and key != "perf/data_wait_fraction"


def _median_of(runs: Sequence[Run], key: str) -> float | None:
    values = [entry[key] for run in runs for entry in run.metrics if isinstance(entry.get(key), int | float)]
    return statistics.median(values) if values else None


def _largest_of(runs: Sequence[Run], keys: Sequence[str]) -> str | None:
    """The largest value of the first of `keys` that was measured, in gigabytes."""
    for key in keys:
        values = [entry[key] for run in runs for entry in run.metrics if isinstance(entry.get(key), int | float)]
        if max(values, default=0) > 0:
            return f"{max(values):.2f} GB{' on the GPU' if 'gpu' in key else ''}"
    return None


def _formatted(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)


MAX_RUNS_BESIDE = 4  # in one table with a column each


def provenance(runs: Sequence[Run]) -> str:
    """Where the numbers come from; of many runs first what is the same for all."""
    return "".join(to_html(grid, code=_CODE_FACTS) for grid in provenance_grids(runs))


def provenance_grids(runs: Sequence[Run]) -> list[Grid]:
    facts = {title: [text(run) for run in runs] for title, text in _FACTS.items()}
    if len(runs) <= MAX_RUNS_BESIDE:
        return [columns(["", *(run.name for run in runs)], [[title, *texts] for title, texts in facts.items()])]
    shared = [[title, texts[0]] for title, texts in facts.items() if len(set(texts)) == 1]
    differing = {title: texts for title, texts in facts.items() if len(set(texts)) > 1}
    own = [[run.name, *(texts[number] for texts in differing.values())] for number, run in enumerate(runs)]
    return [columns(["", "all runs"], shared), columns(["", *differing], own)]


def _commit(run: Run) -> str | None:
    commit = run.provenance.get("git_commit")
    changed = " with uncommitted changes" if run.provenance.get("git_dirty") else ""
    return f"{str(commit)[:12]}{changed}" if commit else None


def _processor(run: Run) -> str | None:
    cpu, num = run.provenance.get("cpu"), run.provenance.get("num_cpus")
    return _text(f"{cpu}, {num} CPUs" if cpu and num else cpu)


def _versions(run: Run) -> str | None:
    versions = run.provenance.get("versions")
    if not isinstance(versions, dict) or not versions:
        return None
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _duration(seconds: Any) -> str | None:
    if not isinstance(seconds, int | float):
        return None
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _manifest(run: Run, name: str) -> str | None:
    """Return the hash of the manifest of now, and those of earlier starts if the data were replaced."""
    now, starts = run.provenance.get(name), run.provenance.get("starts", ())
    earlier = dict.fromkeys(start[name] for start in starts if start.get(name) not in {None, now})
    replaced = f" (in place of {', '.join(hash_[:12] for hash_ in earlier)})" if earlier else ""
    return str(now)[:12] + replaced if now else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


_FACTS: Mapping[str, Callable[[Run], str | None]] = {
    "directory": lambda run: str(run.path),
    "command": lambda run: _text(run.provenance.get("command")),
    "commit": _commit,
    "seed": lambda run: str(run.config.seed),
    "started": lambda run: _text(run.provenance.get("started_at")),
    "processor": _processor,
    "GPU": lambda run: _text(run.provenance.get("gpu") or ("none" if "gpu" in run.provenance else None)),
    "ranks": lambda run: _text(run.provenance.get("world_size")),
    "wall time": lambda run: _duration(run.provenance.get("wall_seconds")),
    "samples a second": lambda run: _formatted(_median_of([run], "perf/samples_per_second"), "{:,.0f}"),
    "waiting for data": lambda run: _formatted(_median_of([run], "perf/data_wait_fraction"), "{:.1%} of the time"),
    "train manifest": lambda run: _manifest(run, "train_manifest_sha256"),
    "test manifest": lambda run: _manifest(run, "test_manifest_sha256"),
    "versions": _versions,
}
_CODE_FACTS = frozenset({"directory", "command", "commit", "train manifest", "test manifest"})


def chip(number: int) -> str:
    return f'<span class="chip" style="background:{COLORS[number % len(COLORS)]}"></span>'
