"""The tables of the report as text: accuracies, differences between configs, speed, provenance.

The page and the Markdown file both show them, so nothing here depends on HTML.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainer.probes.features import LabelSpace
from trainer.probes.groups import Groups
from trainer.probes.linear import ProbeConfig
from trainer.probes.result import ProbeResult
from trainer.provenance import facts_of_starts
from trainer.reports.curves import color_of
from trainer.reports.findings import (
    Method,
    Score,
    baseline,
    baseline_arm,
    score,
    untrained_arms,
    untrained_like,
    winner,
)
from trainer.reports.protocols import by_protocol, describe_protocol, label_titles, of_pixels, probe_command
from trainer.reports.runs import Arm, DatasetArms, Run, config_differences, datasets_of, labels_of, runs_of_arms


@dataclass(frozen=True)
class Grid:
    """A table of text. Every row is as long as `head` and begins with its title. None means "not measured"."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | None]]


@dataclass(frozen=True)
class ResultCell:
    """An accuracy in per cent (None if it was not measured), and the notes in small print below it."""

    accuracy: str | None
    notes: Sequence[str] = ()
    is_best: bool = False


@dataclass(frozen=True)
class ResultRow:
    """The accuracies of an encoder, or of no encoder ("floor"): two cells for each label, linear and kNN."""

    kind: Literal["arm", "untrained", "floor"]
    title: str
    cells: Sequence[ResultCell]
    color: str | None = None
    note: str = ""
    seeds: str = ""


@dataclass(frozen=True)
class ResultTable:
    """The accuracies on one dataset. `labels` are the titles of the probed labels; there may be none.

    `groups` are the accuracies in the worst groups; without rows if no groups were measured.
    """

    title: str
    labels: Sequence[str]
    rows: Sequence[ResultRow]
    groups: Grid


@dataclass(frozen=True)
class ProtocolResults:
    """The tables of one probe protocol, one for each dataset, with the protocol in words, and what its probes read.

    `on_views` says whether the probes are fitted on views, and not on samples without views.
    """

    description: str
    tables: Sequence[ResultTable]
    reads: str
    on_views: bool

    @property
    def is_measured(self) -> bool:
        return any(table.labels for table in self.tables)


def results(arms: Sequence[Arm]) -> list[ProtocolResults]:
    """Return the tables of each probe protocol and each dataset. Only comparable accuracies share a table."""
    found = []
    for group in by_protocol(arms):
        datasets = datasets_of(group.arms)
        tables = []
        for dataset in datasets:
            title = " · ".join(part for part in (group.title, dataset.name if len(datasets) > 1 else "") if part)
            tables.append(_result_table(dataset, title=title[:1].upper() + title[1:], protocol=group.protocol))
        protocol = group.protocol
        found.append(
            ProtocolResults(
                describe_protocol(protocol), tables, reads=protocol.reads, on_views=protocol.views == "policy"
            )
        )
    return found


def group_grid(arms: Sequence[Arm]) -> Grid:
    """Return the test accuracies in the worst groups: a row for each encoder, label and pair of labels.

    The worst group of each run is averaged over the seeds; the group is named if it is the same in all of them.
    """
    titles = label_titles(arms)
    rows: list[list[str | None]] = []
    for arm in arms:
        for space in _measured_spaces([arm]):
            for kind, probes in ((arm.name, arm.trained(space)), (f"{arm.name}, untrained", arm.untrained(space))):
                rows += [[kind, titles[space], *_of_pair(pair, titles)] for pair in _pairs(probes)]
    head = ["encoder", "accuracy of the", "groups", "linear", "worst group", "kNN", "worst group", "not counted"]
    return Grid(head, rows)


def _pairs(probes: Sequence[ProbeResult]) -> list[list[Groups]]:
    """Return the groups of each pair of labels, one for each probe, of the pairs that all the probes have."""
    by_pair = [{groups.labels: groups for groups in probe.groups} for probe in probes]
    shared = [pair for pair in by_pair[0] if all(pair in each for each in by_pair)] if by_pair else []
    return [[each[pair] for each in by_pair] for pair in shared]


def _of_pair(of_runs: Sequence[Groups], titles: Mapping[LabelSpace, str]) -> list[str | None]:
    """Return the cells of one pair of labels, after the encoder and the label."""
    first = of_runs[0]
    cells: list[str | None] = [" × ".join(titles.get(name, name) for name in first.labels)]
    methods: tuple[Method, ...] = ("linear", "knn")
    for method in methods:
        worst = [groups.worst[method] for groups in of_runs if method in groups.worst]
        if len(worst) < len(of_runs):
            cells += [None, ""]
            continue
        names = {one.name for one in worst}
        value = Score(tuple(one.accuracy for one in worst), num_test=min(one.num_test for one in worst))
        cells += [str(value), f"{names.pop()} ({worst[0].num_test})" if len(names) == 1 else "differs between seeds"]
    return [*cells, first.not_counted or "none"]


def _measured_spaces(arms: Sequence[Arm]) -> list[LabelSpace]:
    labels = labels_of(runs_of_arms(arms))
    return [space for space in labels if any(arm.trained(space) or arm.untrained(space) for arm in arms)]


def _result_table(dataset: DatasetArms, *, title: str, protocol: ProbeConfig) -> ResultTable:
    arms = dataset.arms
    spaces, titles = _measured_spaces(arms), label_titles(arms)
    best = {space: winner(arms, space) for space in spaces}
    rows = []
    for number, arm in zip(dataset.numbers, arms, strict=True):
        cells = [cell for space in spaces for cell in _trained_cells(arm, arms, space, is_best=best[space] is arm)]
        seeds = _seeds({titles[space]: arm.trained_seeds(space) for space in spaces})
        rows.append(ResultRow("arm", arm.name, cells, color_of(number), _note(arm, seeds), seeds))
        cells = [cell for space in spaces for cell in _untrained_cells(arm, arms, space)]
        found = {space: baseline_arm(arm, arms, space) for space in spaces}
        of = _seeds({titles[space]: one.untrained_seeds(space) for space, one in found.items() if one is not None})
        note = f"seeds {of}" if of and of != seeds else ""
        rows.append(ResultRow("untrained", "untrained encoder", cells, note=note, seeds=of))
    if any(pixels := [_probe_of_pixels(arms, space, protocol) for space in spaces]):
        cells = [cell for probe in pixels for cell in _floor_cells(probe)]
        rows.append(ResultRow("floor", "raw pixels", cells))
    probes = [next(probe for arm in arms for probe in [*arm.trained(space), *arm.untrained(space)]) for space in spaces]
    for name, shares in (
        ("commonest class", [probe.majority_share for probe in probes]),
        ("chance", [probe.chance for probe in probes]),
    ):
        cells = [cell for share in shares for cell in (ResultCell(f"{100 * share:.1f}"), ResultCell(""))]
        rows.append(ResultRow("floor", name, cells))
    return ResultTable(title, [titles[space] for space in spaces], rows, group_grid(arms))


def _probe_of_pixels(arms: Sequence[Arm], space: LabelSpace, protocol: ProbeConfig) -> ProbeResult | None:
    """Return the first result of the same probe on pixels; None if there is none, or if `protocol` is of pixels."""
    if protocol.reads == "pixels":
        return None
    readouts = [run.readouts.get(of_pixels(protocol), {}) for run in runs_of_arms(arms)]
    return next((of_step[space] for probes in readouts for of_step in probes.values() if space in of_step), None)


def _floor_cells(probe: ProbeResult | None) -> list[ResultCell]:
    probes = [] if probe is None else [probe]
    return [_cell(score(probes, "linear")), _cell(score(probes, "knn"))]


def _trained_cells(arm: Arm, arms: Sequence[Arm], space: LabelSpace, *, is_best: bool) -> list[ResultCell]:
    probes = arm.trained(space)
    linear = score(probes, "linear")
    if linear is None:
        return [ResultCell(None)] * 2
    notes = []
    if untrained := score(baseline(arm, arms, space), "linear"):
        notes.append(signed(100 * (linear.mean - untrained.mean)))
    if len(probes) == 1:
        result = probes[0].linear
        notes.append(f"best {100 * result.best_accuracy:.1f}, epoch {result.best_epoch}")
    return [ResultCell(str(linear), notes, is_best), _cell(score(probes, "knn"))]


def signed(points: float) -> str:
    """Return points with one decimal and their sign, as it is printed.

    Examples:
        >>> signed(-1.25)
        '−1.2'
    """
    return f"{points:+.1f}".replace("-", "−")


def _untrained_cells(arm: Arm, arms: Sequence[Arm], space: LabelSpace) -> list[ResultCell]:
    probes = baseline(arm, arms, space)
    return [_cell(score(probes, "linear")), _cell(score(probes, "knn"))]


def _cell(value: Score | None) -> ResultCell:
    return ResultCell(None if value is None else str(value))


def _seeds(by_title: Mapping[str, Sequence[int]]) -> str:
    """Return the seeds of the results, such as "0, 1", or "0, 1 (picture), 0 (digit)" if the labels have others."""
    texts = {title: ", ".join(map(str, seeds)) for title, seeds in by_title.items() if seeds}
    if len(set(texts.values())) < 2:
        return next(iter(texts.values()), "")
    return ", ".join(f"{text} ({title})" for title, text in texts.items())


def _note(arm: Arm, seeds: str) -> str:
    """Return the steps of the probed checkpoints and, of several runs, the seeds that have results."""
    parts = [arm.probed_at] if arm.probed_at else []
    if len(arm.runs) > 1:
        of_all = ", ".join(str(run.config.seed) for run in arm.runs)
        parts.append(f"{len(arm.runs)} runs, {'' if seeds == of_all else 'results of '}seeds {seeds or 'none'}")
    return "; ".join(parts)


def commands_for_missing_probes(arms: Sequence[Arm]) -> list[str]:
    """Return the commands that fill the gaps of the first protocol's tables.

    The untrained encoder of a configuration is missing for a seed if it was probed for another one.
    """
    group = by_protocol(arms)[0]
    commands = []
    for dataset in datasets_of(group.arms):
        labels = _measured_spaces(dataset.arms)
        known = {space: untrained_arms(dataset.arms, space) for space in labels}
        for arm in dataset.arms:
            has_none = [space for space in labels if untrained_like(arm) not in known[space]]
            for number, run in enumerate(arm.runs):
                trained = [space for space in labels if run.final_probe(space) is None]
                untrained = [space for space in labels if arm.untrained(space) and run.untrained_probe(space) is None]
                untrained += has_none if number == 0 else []
                for missing, more in ((trained, ()), (untrained, ("--step 0",))):
                    if missing or (not labels and (number == 0 or not more)):
                        names = [] if len(missing) == len(labels) else [f"--label {space}" for space in missing]
                        commands.append(probe_command(run, group.protocol, *more, *names))
    return commands


def differences(arms: Sequence[Arm]) -> list[tuple[str, list[list[str]]]]:
    """Return the settings that differ: a name, and for each arm its lines (none if it has no such setting)."""
    return [(row.key, [_setting_lines(values) for values in row.values]) for row in config_differences(arms)]


def difference_grid(arms: Sequence[Arm]) -> Grid:
    """Return the settings that differ, with a column for each arm."""
    rows = [[key, *("; ".join(lines) or "no such setting" for lines in values)] for key, values in differences(arms)]
    return Grid(["setting", *(arm.name for arm in arms)], rows)


def _setting_lines(values: Mapping[str, Sequence[Any]]) -> list[str]:
    shown = {name: " / ".join(map(_plain, distinct)) for name, distinct in values.items()}
    return [f"{name} = {value}" if name else value for name, value in shown.items()]


def _plain(value: Any) -> str:
    """Return a setting as a user would type it; numbers have six digits."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_plain, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def speed_grid(arms: Sequence[Arm]) -> Grid:
    """Return speed and memory of each arm: medians over the logged steps of all its runs, as `speed_notes` says."""
    head = ["", "samples a second", "ranks", "waiting for data", "most time goes to", "memory of a rank", "wall time"]
    return Grid(head, [[arm.name, *_speed(arm.runs)] for arm in arms])


def speed_notes(arms: Sequence[Arm]) -> list[str]:
    """Return a sentence on the steps whose speed and memory count, if a run has several starts."""
    if not any(run.has_several_starts for run in runs_of_arms(arms)):
        return []
    return [
        "Of a run with several starts, speed and memory are those of its first start, because only its processor and "
        "GPU are recorded. If none of its steps are logged, they are those of the later starts."
    ]


def _speed(runs: Sequence[Run]) -> list[str | None]:
    stages = {
        name: median
        for name in sorted({key for run in runs for key in run.metrics.names if _is_stage(key)})
        if (median := _median_of(runs, name)) is not None
    }
    slowest = max(stages, key=lambda name: stages[name], default=None)
    memory = _largest_of(runs, ("memory/gpu_gigabytes", "memory/resident_gigabytes"))
    wall = [seconds for run in runs if (seconds := _wall_seconds(run)) is not None]
    return [
        _formatted(_median_of(runs, "perf/samples_per_second"), "{:,.0f}"),
        " / ".join(dict.fromkeys(ranks for run in runs if (ranks := _ranks(run)))) or None,
        _formatted(_median_of(runs, "perf/data_wait_fraction"), "{:.1%}"),
        f"{slowest.removeprefix('perf/').removesuffix('_fraction')} ({stages[slowest]:.0%})" if slowest else None,
        memory,
        _duration(statistics.median(wall)) if wall else None,
    ]


def _wall_seconds(run: Run) -> float | None:
    """Return the seconds of training in all starts of a run, as in `RunState.wall_seconds`; None if unknown.

    Earlier versions wrote `wall_seconds`, the time of the last start alone. It counts if that start began at step 0.
    """
    facts = run.provenance
    is_whole = not any(start.get("start_step") for start in facts.get("starts", ())[-1:])
    seconds = facts.get("total_wall_seconds", facts.get("wall_seconds") if is_whole else None)
    return seconds if isinstance(seconds, int | float) else None


def _is_stage(key: str) -> bool:
    return key.startswith("perf/") and key.endswith("_fraction") and key != "perf/data_wait_fraction"


def _median_of(runs: Sequence[Run], key: str) -> float | None:
    values = [value for run in runs for value in run.logged_on_one_machine(key)]
    return statistics.median(values) if values else None


def _largest_of(runs: Sequence[Run], keys: Sequence[str]) -> str | None:
    """Return the largest value, in gigabytes, of the first of `keys` that was measured."""
    for key in keys:
        values = [value for run in runs for value in run.logged_on_one_machine(key)]
        if max(values, default=0) > 0:
            return f"{max(values):.2f} GB{' on the GPU' if 'gpu' in key else ''}"
    return None


def _formatted(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)


MAX_RUNS_BESIDE = 4  # in one table with a column each


def provenance_grids(runs: Sequence[Run]) -> list[Grid]:
    facts = {title: [text(run) for run in runs] for title, text in _FACTS.items()}
    if len(runs) <= MAX_RUNS_BESIDE:
        return [Grid(["", *(run.name for run in runs)], [[title, *texts] for title, texts in facts.items()])]
    shared = [[title, texts[0]] for title, texts in facts.items() if len(set(texts)) == 1]
    differing = {title: texts for title, texts in facts.items() if len(set(texts)) > 1}
    own = [[run.name, *(texts[number] for texts in differing.values())] for number, run in enumerate(runs)]
    return [Grid(["", "all runs"], shared), Grid(["", *differing], own)]


def _commit_of(start: Mapping[str, Any]) -> str | None:
    commit = start.get("git_commit")
    changed = " with uncommitted changes" if start.get("git_diff_sha256") else ""
    return f"{str(commit)[:12]}{changed}" if commit else None


def _ranks(run: Run) -> str | None:
    return _of_all_starts(run, lambda start: _text(start.get("world_size")))


def _of_all_starts(run: Run, text: Callable[[Mapping[str, Any]], str | None]) -> str | None:
    """Return what `text` says of each start of a run, without repetitions: "1, then 2"."""
    texts = [found for start in facts_of_starts(run.provenance) if (found := text(start)) is not None]
    return ", then ".join(dict.fromkeys(texts)) or None


def _processor(run: Run) -> str | None:
    cpu, num = run.provenance.get("cpu"), run.provenance.get("num_cpus")
    return _text(f"{cpu}, {num} CPUs" if cpu and num else cpu)


def _of_first_start(run: Run, fact: str | None) -> str | None:
    """Return a fact of the machine, which only the first start records, and say so if there are later starts.

    A later start may be on another machine: a run that began on a GPU can go on without one.
    """
    return f"{fact}, at the first start" if fact is not None and run.has_several_starts else fact


def _of_logged_start(run: Run, fact: str | None) -> str | None:
    """Return a fact of `Run.logged_on_one_machine`, and say of which start it is if there are later ones."""
    is_of_first = not run.has_several_starts or run.has_steps_of_first_start
    return _of_first_start(run, fact) if fact is None or is_of_first else f"{fact}, after the first start"


def _gpu(run: Run) -> str | None:
    return _text(run.provenance.get("gpu") or ("none" if "gpu" in run.provenance else None))


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
    """Return the hash of the present manifest, and earlier hashes if the data were replaced."""
    now, starts = run.provenance.get(name), run.provenance.get("starts", ())
    earlier = dict.fromkeys(start[name] for start in starts if start.get(name) not in {None, now})
    replaced = f" (in place of {', '.join(hash_[:12] for hash_ in earlier)})" if earlier else ""
    return str(now)[:12] + replaced if now else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


_FACTS: Mapping[str, Callable[[Run], str | None]] = {
    "directory": lambda run: str(run.path),
    "command": lambda run: _of_all_starts(run, lambda start: _text(start.get("command"))),
    "commit": lambda run: _of_all_starts(run, _commit_of),
    "seed": lambda run: str(run.config.seed),
    "started": lambda run: _text(run.provenance.get("started_at")),
    "processor": lambda run: _of_first_start(run, _processor(run)),
    "GPU": lambda run: _of_first_start(run, _gpu(run)),
    "ranks": _ranks,
    "wall time": lambda run: _duration(_wall_seconds(run)),
    "samples a second": lambda run: _of_logged_start(
        run, _formatted(_median_of([run], "perf/samples_per_second"), "{:,.0f}")
    ),
    "waiting for data": lambda run: _of_logged_start(
        run, _formatted(_median_of([run], "perf/data_wait_fraction"), "{:.1%} of the time")
    ),
    "train manifest": lambda run: _manifest(run, "train_manifest_sha256"),
    "test manifest": lambda run: _manifest(run, "test_manifest_sha256"),
    "versions": lambda run: _of_first_start(run, _versions(run)),
}
CODE_FACTS = frozenset({"directory", "command", "commit", "train manifest", "test manifest"})
