"""Reading run directories, and sorting them into arms: the runs that differ by their seed alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_pipeline.errors import UserError
from trainer.analysis.views import ViewsResult, analyze_views
from trainer.config import RunConfig, flatten, read_config
from trainer.probes.features import LABEL_SPACES, LabelSpace
from trainer.probes.linear import ProbeConfig
from trainer.probes.result import ProbeResult, read_result
from trainer.reporting.science import science_of
from trainer.rundir import RunDir, open_run


@dataclass(frozen=True)
class Views:
    """The grid and the numbers of `python -m trainer.analyze views`; `png` is None where `problem` says why."""

    png: bytes | None
    result: ViewsResult | None
    problem: str = ""


@dataclass(frozen=True)
class Picture:
    """What `python -m trainer.analyze NAME` left behind: its picture, and the numbers beside it by their path."""

    name: str
    png: bytes
    numbers: Mapping[str, str]


Probes = Mapping[int, Mapping[LabelSpace, ProbeResult]]  # by step and label; step 0 is the untrained encoder


@dataclass(frozen=True)
class Run:
    """All that a report shows of one run.

    Results of different probe protocols are never mixed: `readouts` holds those of each protocol, and `probes` are
    those of `protocol`. `read_runs` sets it to the protocol of the run's own config, `under` to another one.
    """

    name: str
    path: Path
    config: RunConfig
    provenance: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    readouts: Mapping[ProbeConfig, Probes]
    protocol: ProbeConfig
    views: Views
    pictures: tuple[Picture, ...] = ()

    @property
    def probes(self) -> Probes:
        return self.readouts.get(self.protocol, {})

    @property
    def own_protocol(self) -> ProbeConfig:
        return protocol_of(self.config.probe)

    def under(self, protocol: ProbeConfig) -> Run:
        """Return this run with the probe results of another protocol, which may be none."""
        return replace(self, protocol=protocol)

    def final_probe(self, space: LabelSpace) -> ProbeResult | None:
        """The probe of the latest probed checkpoint; None where only the untrained encoder was probed, or nothing."""
        step = max(self.probes, default=0)
        return self.probes[step].get(space) if step > 0 else None

    def untrained_probe(self, space: LabelSpace) -> ProbeResult | None:
        return self.probes.get(0, {}).get(space)

    @property
    def data_key(self) -> tuple[str, str]:
        """What tells datasets apart: the hashes of both manifests, or their places where no hash is known."""
        results = [vars(one) for probes in self.readouts.values() for step in probes.values() for one in step.values()]
        for source in [*results, self.provenance]:
            hashes = source.get("train_manifest_sha256"), source.get("test_manifest_sha256")
            if all(hashes):
                return str(hashes[0]), str(hashes[1])
        return self.config.data.train_dir, self.config.data.test_dir

    @property
    def data_name(self) -> str:
        """The folder that holds train and test set, or the place of the train set where its name says more."""
        parts = self.config.data.train_dir.rstrip("/").split("/")
        return parts[-2] if len(parts) > 1 and parts[-1] == "train" else self.config.data.train_dir


@dataclass(frozen=True)
class Arm:
    """One configuration: runs that differ by their seed alone."""

    name: str
    runs: tuple[Run, ...]

    def under(self, protocol: ProbeConfig) -> Arm:
        return replace(self, runs=tuple(run.under(protocol) for run in self.runs))

    def trained(self, space: LabelSpace) -> list[ProbeResult]:
        return [probe for run in self.runs if (probe := run.final_probe(space)) is not None]

    def untrained(self, space: LabelSpace) -> list[ProbeResult]:
        return [probe for run in self.runs if (probe := run.untrained_probe(space)) is not None]


@dataclass(frozen=True)
class Dataset:
    """The arms that were trained and tested on the same data, and so may be compared; with their numbers in the report,
    by which they are coloured.
    """

    name: str
    arms: tuple[Arm, ...]
    numbers: tuple[int, ...]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read every run once. Missing view grids are made now, where checkpoint and data are at hand.

    Raises `UserError` where a path is not a run directory, is named twice, or holds a damaged file.
    """
    for path, count in Counter(path.resolve() for path in paths).items():
        if count > 1:
            raise UserError(f"{path} is named {count} times; name each run directory once")
    directories = [open_run(path) for path in paths]
    configs = [read_config(run_dir.config) for run_dir in directories]
    names = _unique_names(directories, configs)
    return [_read_run(*run) for run in zip(directories, configs, names, strict=True)]


def arms_of(runs: Sequence[Run]) -> list[Arm]:
    """Runs by configuration, in the order of their first run."""
    grouped: dict[tuple[str, tuple[str, str]], list[Run]] = {}
    for run in runs:
        grouped.setdefault((science_of(run.config), run.data_key), []).append(run)
    groups = list(grouped.values())
    return [Arm(name, tuple(group)) for name, group in zip(_arm_names(groups), groups, strict=True)]


def datasets_of(arms: Sequence[Arm]) -> list[Dataset]:
    """The arms by their data, in the order of the first arm of each."""
    grouped: dict[tuple[str, str], list[int]] = {}
    for number, arm in enumerate(arms):
        grouped.setdefault(arm.runs[0].data_key, []).append(number)
    names = [arms[numbers[0]].runs[0].data_name for numbers in grouped.values()]
    return [
        Dataset(
            name if names.count(name) == 1 else f"{name} ({key[0][:12]})",
            tuple(arms[number] for number in numbers),
            tuple(numbers),
        )
        for name, (key, numbers) in zip(names, grouped.items(), strict=True)
    ]


@dataclass(frozen=True)
class Difference:
    """One setting, or a whole section where the arms do not have the same settings in it.

    `values` has for each arm the settings by their name below `key` ("" for `key` itself), each with the values that
    its runs have, one unless it is a seed or the like; empty where the arm has no such setting.
    """

    key: str
    values: tuple[Mapping[str, Sequence[Any]], ...]


def config_differences(arms: Sequence[Arm]) -> list[Difference]:
    """The settings that are not the same in all runs, in the order of the config."""
    arm_flats = [[flatten(run.config) for run in arm.runs] for arm in arms]
    flats = [flat for arm in arm_flats for flat in arm]
    keys = list(dict.fromkeys(key for flat in flats for key in flat))
    differing = [key for key in keys if any(key not in flat or flat[key] != flats[0].get(key) for flat in flats)]
    sections = {key.partition(".")[0] for key in differing if any(key not in flat for flat in flats)}
    grouped: dict[str, list[str]] = {}
    for key in differing:
        section = key.partition(".")[0]
        grouped.setdefault(section if section in sections else key, []).append(key)
    return [
        Difference(
            row,
            tuple(
                {
                    key.removeprefix(row).removeprefix("."): _distinct(flat[key] for flat in arm)
                    for key in row_keys
                    if key in arm[0]
                }
                for arm in arm_flats
            ),
        )
        for row, row_keys in grouped.items()
    ]


def _distinct(values: Iterable[Any]) -> list[Any]:
    distinct: list[Any] = []
    for value in values:
        if value not in distinct:
            distinct.append(value)
    return distinct


def _read_run(run_dir: RunDir, config: RunConfig, name: str) -> Run:
    return Run(
        name=name,
        path=run_dir.path,
        config=config,
        provenance=_read_object(run_dir.provenance) if run_dir.provenance.is_file() else {},
        metrics=run_dir.read_metrics(),
        readouts=_read_readouts(run_dir),
        protocol=protocol_of(config.probe),
        views=_read_views(run_dir),
        pictures=tuple(_read_pictures(run_dir)),
    )


def protocol_of(config: ProbeConfig) -> ProbeConfig:
    """Return the settings that make accuracies comparable: all of the probe but its seed and the online probe."""
    return config.protocol.model_copy(update={"seed": 0})


def _read_readouts(run_dir: RunDir) -> dict[ProbeConfig, Probes]:
    """Read the results of every protocol. What a file holds decides its protocol, not the name of the file."""
    readouts: dict[ProbeConfig, dict[int, dict[LabelSpace, ProbeResult]]] = {}
    for step in run_dir.probe_steps():
        for space in LABEL_SPACES:
            for path in sorted(run_dir.probes(step).glob(f"{space}*.json"), key=lambda path: (len(path.name), path)):
                result = read_result(path)
                if (result.label, result.checkpoint_step) != (space, step):
                    raise UserError(
                        f"{path} is a result of label_{result.label} at step {result.checkpoint_step}, and lies where "
                        f"those of label_{space} at step {step} do; put it back, or remove it"
                    )
                of_step = readouts.setdefault(protocol_of(result.probe_config), {}).setdefault(step, {})
                of_step.setdefault(space, result)
    return {**readouts}


def _read_views(run_dir: RunDir) -> Views:
    json_path, png_path = run_dir.analysis / "views.json", run_dir.analysis / "views.png"
    if not (json_path.is_file() and png_path.is_file()):
        try:
            analyze_views(run_dir)
        except UserError as error:
            return Views(None, None, str(error))
    return Views(png_path.read_bytes(), ViewsResult.parse(_read_object(json_path), where=str(json_path)))


def _read_pictures(run_dir: RunDir) -> Iterator[Picture]:
    """Of all analyses but the view grids, which a report shows for themselves."""
    for path in sorted(run_dir.analysis.glob("*.png")):
        if path.stem != "views":
            json_path = path.with_suffix(".json")
            numbers = _numbers(_read_object(json_path)) if json_path.is_file() else {}
            yield Picture(path.stem, path.read_bytes(), numbers)


def _numbers(value: Any, path: str = "") -> dict[str, str]:
    """All that a reader may want of a result, by its dotted path: no long lists, no hashes, no settings."""
    if isinstance(value, dict):
        items = [(key, inner) for key, inner in value.items() if key != "config" and not key.endswith("sha256")]
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        items = [(str(number), inner) for number, inner in enumerate(value, 1)]
    elif isinstance(value, list):
        return {path: ", ".join(map(_short, value))} if 0 < len(value) <= 12 else {}
    else:
        return {} if value is None else {path: _short(value)}
    return {
        name: text for key, inner in items for name, text in _numbers(inner, f"{path}.{key}".removeprefix(".")).items()
    }


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); restore it or leave this run out") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold a JSON object; restore it or leave this run out")
    return value


def _unique_names(directories: Sequence[RunDir], configs: Sequence[RunConfig]) -> list[str]:
    """For each run the first that no other run has: its name; name and seed; directory name; path."""
    candidates = [
        [config.name for config in configs],
        [f"{config.name}, seed {config.seed}" for config in configs],
        [run_dir.path.resolve().name for run_dir in directories],
        [str(run_dir.path) for run_dir in directories],
    ]
    return [
        next(names[number] for names in candidates if names.count(names[number]) == 1)
        for number in range(len(directories))
    ]


def _arm_names(groups: Sequence[Sequence[Run]]) -> list[str]:
    """The name in the configs of an arm's runs, or the names of its runs where another arm has the same."""
    names = [" / ".join(dict.fromkeys(run.config.name for run in runs)) for runs in groups]
    return [
        name if names.count(name) == 1 else ", ".join(run.name for run in runs)
        for name, runs in zip(names, groups, strict=True)
    ]
