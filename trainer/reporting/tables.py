"""The tables of the report as HTML: accuracies, differences between configs, provenance."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from trainer.probes.features import LABEL_SPACES, LabelSpace
from trainer.reporting.curves import COLORS
from trainer.reporting.findings import Score, baseline, score
from trainer.reporting.runs import Arm, Run, config_differences

NOT_MEASURED = '<span class="none">not measured</span>'


def results(arms: Sequence[Arm]) -> str:
    spaces = [space for space in LABEL_SPACES if any(arm.trained(space) or arm.untrained(space) for arm in arms)]
    commands = _missing_probes(arms)
    if not spaces:
        return f"<p>Nothing has been probed yet.</p>{commands}"
    head = "".join(f'<th class="number" colspan="2">label_{space}</th>' for space in spaces)
    methods = '<th class="number">linear</th><th class="number">kNN</th>' * len(spaces)
    rows: list[str] = []
    best = {
        space: max((s.mean for arm in arms if (s := score(arm.trained(space), "linear"))), default=0)
        for space in spaces
    }
    for number, arm in enumerate(arms):
        cells = "".join(_trained_cells(arm, arms, space, best[space]) for space in spaces)
        rows.append(f'<tr class="arm"><th>{chip(number)}{escape(arm.name)}{_stage(arm)}</th>{cells}</tr>')
        cells = "".join(_untrained_cells(arm, arms, space) for space in spaces)
        rows.append(f'<tr class="untrained"><td>untrained encoder</td>{cells}</tr>')
    for title, attribute in (("commonest class", "majority_share"), ("chance", "chance")):
        cells = ""
        for space in spaces:
            probe = next(probe for arm in arms for probe in [*arm.trained(space), *arm.untrained(space)])
            cells += f'<td class="number">{100 * getattr(probe, attribute):.1f}</td><td></td>'
        rows.append(f'<tr class="floor"><td>{title}</td>{cells}</tr>')
    fitted_on = {
        "policy": "views of the run's own policy (for the untrained encoder, the untrained policy)",
        "none": "pictures without views",
    }
    protocols = sorted({run.config.probe.views for arm in arms for run in arm.runs})
    caption = (
        "Test accuracy in %. Linear: softmax regression on the flattened pre-pool map of the frozen encoder, fitted on "
        f"{' or '.join(fitted_on[protocol] for protocol in protocols)}, after its last epoch; below it the gain over "
        "the untrained encoder in points, and the best epoch, which was chosen by "
        "its test accuracy and is therefore optimistic. kNN: weighted vote of the nearest train pictures by the cosine "
        "of pooled features. ± is the sample standard deviation over seeds."
    )
    return (
        f'<div class="scroll"><table class="wide"><thead><tr><th></th>{head}</tr><tr><th></th>{methods}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div><p class='caption'>{caption}</p>{commands}"
    )


def _trained_cells(arm: Arm, arms: Sequence[Arm], space: LabelSpace, best: float) -> str:
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
    number = f"<strong>{linear}</strong>" if linear.mean == best and len(arms) > 1 else str(linear)
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


def _missing_probes(arms: Sequence[Arm]) -> str:
    """The commands that would fill the gaps of the table."""
    commands = []
    for arm in arms:
        for run in arm.runs:
            if not any(run.final_probe(space) for space in LABEL_SPACES):
                commands.append(f"python -m trainer.probe {run.path}")
        if not any(baseline(arm, arms, space) for space in LABEL_SPACES):
            commands.append(f"python -m trainer.probe {arm.runs[0].path} --step 0")
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
        + "".join(f'<td class="settings">{_settings(values)}</td>' for values in row.values)
        + "</tr>"
        for row in rows
    )
    return _table(f"<th>setting</th>{head}", body) + _configs(runs)


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
    shown = {name: " / ".join(map(_plain, distinct)) for name, distinct in values.items()}
    lines = [f"{name} = {value}" if name else value for name, value in shown.items()]
    return f"<code>{'<br>'.join(map(escape, lines))}</code>"


def _plain(value: Any) -> str:
    """A setting as a user would type it; numbers to six digits."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_plain, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def provenance(runs: Sequence[Run]) -> str:
    rows: dict[str, Callable[[Run], str]] = {
        "directory": lambda run: f"<code>{escape(str(run.path))}</code>",
        "command": lambda run: _code(run.provenance.get("command")),
        "commit": _commit,
        "seed": lambda run: str(run.config.seed),
        "started": lambda run: _text(run.provenance.get("started_at")),
        "processor": _processor,
        "GPU": lambda run: _text(run.provenance.get("gpu") or ("none" if "gpu" in run.provenance else None)),
        "ranks": lambda run: _text(run.provenance.get("world_size")),
        "wall time": lambda run: _duration(run.provenance.get("wall_seconds")),
        "samples a second": lambda run: _median(run, "perf/samples_per_second", "{:,.0f}"),
        "waiting for data": lambda run: _median(run, "perf/data_wait_fraction", "{:.1%} of the time"),
        "train manifest": lambda run: _hash(run.provenance.get("train_manifest_sha256")),
        "test manifest": lambda run: _hash(run.provenance.get("test_manifest_sha256")),
        "versions": _versions,
    }
    head = "<th></th>" + "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    body = "".join(
        f"<tr><th>{title}</th>" + "".join(f'<td class="provenance">{text(run)}</td>' for run in runs) + "</tr>"
        for title, text in rows.items()
    )
    return _table(head, body)


def _commit(run: Run) -> str:
    commit = run.provenance.get("git_commit")
    changed = " with uncommitted changes" if run.provenance.get("git_dirty") else ""
    return f"<code>{escape(str(commit)[:12])}</code>{changed}" if commit else NOT_MEASURED


def _processor(run: Run) -> str:
    cpu, num = run.provenance.get("cpu"), run.provenance.get("num_cpus")
    return _text(f"{cpu}, {num} CPUs" if cpu and num else cpu)


def _versions(run: Run) -> str:
    versions = run.provenance.get("versions")
    if not isinstance(versions, dict) or not versions:
        return NOT_MEASURED
    return ", ".join(escape(f"{name} {version}") for name, version in versions.items())


def _median(run: Run, key: str, form: str) -> str:
    values = [entry[key] for entry in run.metrics if isinstance(entry.get(key), int | float)]
    return form.format(statistics.median(values)) if values else NOT_MEASURED


def _duration(seconds: Any) -> str:
    if not isinstance(seconds, int | float):
        return NOT_MEASURED
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _hash(value: Any) -> str:
    return f"<code>{escape(str(value)[:12])}</code>" if value else NOT_MEASURED


def _text(value: Any) -> str:
    return NOT_MEASURED if value is None else escape(str(value))


def _code(value: Any) -> str:
    return f"<code>{escape(str(value))}</code>" if value else NOT_MEASURED


def chip(number: int) -> str:
    return f'<span class="chip" style="background:{COLORS[number % len(COLORS)]}"></span>'


def _table(head: str, body: str) -> str:
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
