"""Read run directories, and group the runs into arms. The runs of an arm differ only in their seed."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_pipeline.core.errors import UserError, storage_problem
from data_pipeline.core.schema import flatten
from trainer.analyses.loaded_run import AnalysisOptions, write_result
from trainer.analyses.views import ViewsResult, measure_views
from trainer.config import RunConfig, read_run_config
from trainer.preflight import edited_config
from trainer.probes.features import LabelSpace, label_order
from trainer.probes.linear import ProbeConfig
from trainer.probes.result import ProbeResult, labels_in, read_result
from trainer.provenance import train_sets
from trainer.records import read_provenance
from trainer.reports.config_identity import config_identity, run_identity
from trainer.reports.logged_metrics import LoggedMetrics
from trainer.reports.run_index import RunIndex
from trainer.run_dir import RunDir, open_run, places_of_probes, read_object

logger = logging.getLogger(__name__)

NO_NUMBER = "— no number"
_NO_INDEX = RunIndex(None)


@dataclass(frozen=True)
class Views:
    """The grid and the numbers of `python -m trainer.analyze views`. If `png` is None, `problem` is the reason."""

    png: bytes | None
    result: ViewsResult | None
    problem: str = ""


@dataclass(frozen=True)
class Picture:
    """The result of `python -m trainer.analyze NAME`: the picture, and the numbers by their dotted paths."""

    name: str
    png: bytes
    numbers: Mapping[str, str]


Probes = Mapping[int, Mapping[LabelSpace, ProbeResult]]  # by step and label; step 0 is the untrained encoder


@dataclass(frozen=True)
class Run:
    """The parts of a run that a report shows.

    readouts: the results of each probe protocol.
    protocol: the protocol of `probes`, so that results of different protocols are never mixed. `read_runs` takes it
        from the run's config, and `under` changes it.
    problems: sentences that name the damaged parts, which were left out, and replaced data.
    """

    name: str
    path: Path
    config: RunConfig
    provenance: Mapping[str, Any]
    metrics: LoggedMetrics
    readouts: Mapping[ProbeConfig, Probes]
    protocol: ProbeConfig
    views: Views
    pictures: tuple[Picture, ...] = ()
    problems: tuple[str, ...] = ()
    assumed_data: tuple[str, str] | None = None

    @property
    def probes(self) -> Probes:
        return self.readouts.get(self.protocol, {})

    @property
    def own_protocol(self) -> ProbeConfig:
        return protocol_of(self.config.probe)

    def under(self, protocol: ProbeConfig) -> Run:
        """Return this run with the probe results of another protocol; there may be none."""
        return replace(self, protocol=protocol)

    def final_probe(self, space: LabelSpace) -> ProbeResult | None:
        """Return the probe of the last probed checkpoint; None if no trained encoder was probed."""
        step = max(self.probes, default=0)
        return self.probes[step].get(space) if step > 0 else None

    @property
    def probed_step(self) -> int | None:
        """Return the step of the last probed checkpoint; None if no trained encoder was probed."""
        return max((step for step in self.probes if step > 0), default=None)

    @property
    def is_probed_at_end(self) -> bool:
        """Tell whether the last probed checkpoint is that of the end of the training, and the training has ended."""
        finished = self.provenance.get("finished_step")
        return self.probed_step is not None and finished is not None and self.probed_step >= finished

    @property
    def probed_at(self) -> str:
        """Return the probed step in words: "step 16", "step 4 of 16" or "step 4 of a run that has not ended"."""
        of_all = self.provenance.get("finished_step", "a run that has not ended")
        return f"step {self.probed_step}" + ("" if self.is_probed_at_end else f" of {of_all}")

    @property
    def stands_at(self) -> str | None:
        """Return the last logged step in words if the run has not ended; None if it has, or has logged nothing."""
        if "finished_step" in self.provenance or self.metrics.last_step is None:
            return None
        return f"step {self.metrics.last_step} of a run that has not ended"

    def untrained_probe(self, space: LabelSpace) -> ProbeResult | None:
        return self.probes.get(0, {}).get(space)

    def logged(self, key: str) -> dict[int, float]:
        """Return the values of a metric by step."""
        return self.metrics.by_step(key)

    @property
    def has_several_starts(self) -> bool:
        return len(self.provenance.get("starts", ())) > 1

    @property
    def has_steps_of_first_start(self) -> bool:
        """Tell whether steps of the first start are logged. A later start that began before them replaced them."""
        first = self.metrics.first_step
        return first is not None and first <= self._end_of_first_start

    def logged_on_one_machine(self, key: str) -> list[float]:
        """Return the values of a metric of speed or memory at the first start, whose machine provenance.json names.

        A later start may be on another machine. Its values count only if no steps of the first start are logged.
        """
        end, is_first = self._end_of_first_start, self.has_steps_of_first_start
        return [value for step, value in self.logged(key).items() if (step <= end) == is_first]

    @property
    def _end_of_first_start(self) -> float:
        """Return the last step of the first start that no later start took again; infinity without a later start."""
        later = (start.get("start_step") for start in self.provenance.get("starts", ())[1:])
        return min((step for step in later if isinstance(step, int)), default=math.inf)

    @property
    def replaced_train_sets(self) -> tuple[str, ...]:
        """Return the hashes of all train sets of the training if one is not that of the probes; empty if none is.

        Without probes, the newest one counts as that of the probes.
        """
        recorded = train_sets(self.config, self.provenance)
        results = (one for probes in self.readouts.values() for step in probes.values() for one in step.values())
        probed = {one.train_manifest_sha256 for one in results} or set(recorded[-1:])
        return recorded if recorded and {*recorded} != probed else ()

    @property
    def data_key(self) -> tuple[str, ...]:
        """Return the hashes of both manifests, or the directories of the datasets if a hash is not known.

        If the train set was replaced before the end of the training or before the probes, the hashes of those of the
        training follow.
        """
        return (*self.data_now, *self.replaced_train_sets)

    @property
    def is_of_known_data(self) -> bool:
        """Tell whether `data_key` holds hashes: the run has begun, or was probed."""
        return self.data_now != self.directories

    @property
    def directories(self) -> tuple[str, str]:
        """Return the locations of the train set and of the test set in the config."""
        return " ".join(self.config.data.train_locations.values()), self.config.data.test_dir

    @property
    def data_now(self) -> tuple[str, str]:
        """Return the hashes of both manifests that the probes read, or those of the newest start, or directories."""
        if self.assumed_data is not None:
            return self.assumed_data
        results = [vars(one) for probes in self.readouts.values() for step in probes.values() for one in step.values()]
        if self.config.data.mixture is not None:  # a probe reads only one of its sources
            results = []
        for source in [*results, self.provenance]:
            hashes = source.get("train_manifest_sha256"), source.get("test_manifest_sha256")
            if all(hashes):
                return str(hashes[0]), str(hashes[1])
        return self.directories

    @property
    def data_name(self) -> str:
        """Return the name of the directory above train/, or the directory of the train set if it has another name.

        The name of a mixture is that of its sources, such as "birds+photos".
        """
        train_dir = self.config.data.train_dir
        if train_dir is None:
            return "+".join(self.config.data.train_locations)
        parts = train_dir.rstrip("/").split("/")
        return parts[-2] if len(parts) > 1 and parts[-1] == "train" else train_dir


@dataclass(frozen=True)
class Arm:
    """One configuration: the runs that differ only in their seed.

    repeated: further runs with the seed of one of `runs`, such as copies; only figures of sweeps show them.
    """

    name: str
    runs: tuple[Run, ...]
    repeated: tuple[Run, ...] = ()

    def under(self, protocol: ProbeConfig) -> Arm:
        runs, repeated = (tuple(run.under(protocol) for run in group) for group in (self.runs, self.repeated))
        return replace(self, runs=runs, repeated=repeated)

    def trained(self, space: LabelSpace) -> list[ProbeResult]:
        return [probe for run in self.runs if (probe := run.final_probe(space)) is not None]

    def untrained(self, space: LabelSpace) -> list[ProbeResult]:
        return [probe for run in self.runs if (probe := run.untrained_probe(space)) is not None]

    def trained_seeds(self, space: LabelSpace) -> tuple[int, ...]:
        """Return the seeds of `trained`."""
        return tuple(run.config.seed for run in self.runs if run.final_probe(space) is not None)

    def untrained_seeds(self, space: LabelSpace) -> tuple[int, ...]:
        """Return the seeds of `untrained`."""
        return tuple(run.config.seed for run in self.runs if run.untrained_probe(space) is not None)

    @property
    def probed_at(self) -> str:
        """Return the probed steps in words, such as "step 16" or, of two seeds, "step 16 and step 4 of 16"."""
        return join(list(dict.fromkeys(run.probed_at for run in self.runs if run.probed_step is not None)))


@dataclass(frozen=True)
class DatasetArms:
    """The arms on one dataset, which may be compared. `numbers` are their numbers in the report, for colours."""

    name: str
    arms: tuple[Arm, ...]
    numbers: tuple[int, ...]


def read_runs(
    paths: Sequence[Path],
    *,
    probes_at: Path | None = None,
    make_views: bool = True,
    index: RunIndex = _NO_INDEX,
) -> list[Run]:
    """Read every run, and make its grid of views if there is none of the newest checkpoint, and if the data are there.

    probes_at: a directory with further probe results, by the name of each run directory. They replace the run's own.
    make_views: whether to make grids of views, which takes seconds for each run.
    index: where metrics are read that did not change since the last report.

    A path that is named twice, such as by itself and by the directory of its study, is read once. Raises `UserError` if
    a path is not a run directory, or holds a damaged config or result.
    """
    once: dict[Path, Path] = {}
    for path in paths:
        once.setdefault(path.resolve(), path)
    directories = [open_run(path) for path in once.values()]
    configs = [read_run_config(run_dir) for run_dir in directories]
    names = _unique_names(directories, configs)
    places: list[list[RunDir]] = [[run_dir] for run_dir in directories]
    if probes_at is not None:
        if not probes_at.is_dir():
            raise UserError(f"{probes_at} is no directory; pass to --probes the --out of `python -m trainer.probe`")
        elsewhere = places_of_probes(directories, probes_at)
        places = [[other, *own] for other, own in zip(elsewhere, places, strict=True)]
    runs = [
        _read_run(
            run_dir,
            config,
            name,
            probe_places=of_run,
            options=AnalysisOptions() if make_views else None,
            index=index,
        )
        for run_dir, config, name, of_run in zip(directories, configs, names, places, strict=True)
    ]
    return _with_assumed_data(runs)


def _with_assumed_data(runs: Sequence[Run]) -> list[Run]:
    """Let runs that have not begun have the data of the others with their directories, if these have the same data."""
    known: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for run in runs:
        if run.is_of_known_data:
            known.setdefault(run.directories, set()).add(run.data_now)
    return [
        run
        if run.is_of_known_data or len(of_others := known.get(run.directories, set())) != 1
        else replace(run, assumed_data=next(iter(of_others)))
        for run in runs
    ]


def arms_of(runs: Sequence[Run]) -> list[Arm]:
    """Group runs by configuration, in the order of their first run.

    Of runs with the same configuration, data and seed, such as copies, one counts: the one probed at the latest step,
    or of several the one with most results. Its `problems` name the others, which are `repeated` and left out of all
    else.
    """
    grouped: dict[tuple[str, tuple[str, ...]], dict[int, list[Run]]] = {}
    for run in runs:
        by_seed = grouped.setdefault((config_identity(run.config), run.data_key), {})
        by_seed.setdefault(run.config.seed, []).append(run)
    groups = [[_one_of(of_seed) for of_seed in by_seed.values()] for by_seed in grouped.values()]
    counted = {run.path for group in groups for run in group}
    repeated = [
        tuple(run for of_seed in by_seed.values() for run in of_seed if run.path not in counted)
        for by_seed in grouped.values()
    ]
    return [
        Arm(name, tuple(group), others)
        for name, group, others in zip(_arm_names(groups), groups, repeated, strict=True)
    ]


def _one_of(of_seed: Sequence[Run]) -> Run:
    """Return the run that counts of those with one configuration and one seed."""
    counted = max(of_seed, key=_how_much_is_probed)
    left_out = tuple(
        f"Left out{' of the tables' if run.config.tracking.axes else ''}: {run.path} has the configuration, the data "
        f"and the seed {run.config.seed} of {counted.path}, and a seed counts once."
        for run in of_seed
        if run is not counted
    )
    return replace(counted, problems=(*counted.problems, *left_out))


def _how_much_is_probed(run: Run) -> tuple[int, int]:
    """Return the latest probed step, -1 if there is none, and the number of results of all steps and protocols."""
    of_steps = [(step, len(found)) for probes in run.readouts.values() for step, found in probes.items()]
    return max((step for step, _ in of_steps), default=-1), sum(num for _, num in of_steps)


def join(parts: Sequence[str]) -> str:
    """Return "a, b and c"; empty without parts."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def runs_of_arms(arms: Sequence[Arm]) -> list[Run]:
    return [run for arm in arms for run in arm.runs]


def datasets_of(arms: Sequence[Arm]) -> list[DatasetArms]:
    """Group arms by dataset, in the order of their first arm."""
    grouped: dict[tuple[str, ...], list[int]] = {}
    for number, arm in enumerate(arms):
        grouped.setdefault(arm.runs[0].data_key, []).append(number)
    names = [arms[numbers[0]].runs[0].data_name for numbers in grouped.values()]
    return [
        DatasetArms(
            name if names.count(name) == 1 else f"{name} ({_described_data(key)})",
            tuple(arms[number] for number in numbers),
            tuple(numbers),
        )
        for name, (key, numbers) in zip(names, grouped.items(), strict=True)
    ]


@dataclass(frozen=True)
class Difference:
    """A setting that differs, or a whole section if the arms do not have the same settings in it.

    `values` has a mapping for each arm. Its keys are the names of the settings below `key`, or "" for `key` itself. Its
    values are the distinct values in the runs of the arm. It is empty if the arm has no such setting.
    """

    key: str
    values: tuple[Mapping[str, Sequence[Any]], ...]


def config_differences(arms: Sequence[Arm]) -> list[Difference]:
    """Return the settings that are not the same in all runs, in the order of the config."""
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


def _read_run(
    run_dir: RunDir,
    config: RunConfig,
    name: str,
    *,
    probe_places: Sequence[RunDir],
    options: AnalysisOptions | None,
    index: RunIndex,
) -> Run:
    metrics, provenance = index.read_metrics(run_dir.metrics), read_provenance(run_dir.provenance)
    identity = run_identity(config, provenance.facts)
    found, of_other_runs = _read_readouts(probe_places, run_dir, identity)
    readouts, of_other_data = _of_one_dataset(found, run_dir, protocol=protocol_of(config.probe))
    results = (one for probes in readouts.values() for of_step in probes.values() for one in of_step.values())
    test_set = next((one.test_manifest_sha256 for one in results), None)
    pictures, left_out = _read_pictures(run_dir, test_set=test_set)
    run = Run(
        name=name,
        path=run_dir.path,
        config=config,
        provenance=provenance.facts,
        metrics=LoggedMetrics.of(metrics.entries),
        readouts=readouts,
        protocol=protocol_of(config.probe),
        views=_read_views(run_dir, options, test_set=test_set),
        pictures=pictures,
    )
    of_others = (*of_other_runs, *of_other_data)
    problems = (*metrics.problems, *provenance.problems, *left_out, *of_others, *_replaced_train_set(run))
    problems += (*_probed_earlier(run), *_edited_config(run_dir, config), *_left_out(run))
    for problem in problems:
        logger.warning("%s", problem)
    return replace(run, problems=problems)


def _described_data(key: Sequence[str]) -> str:
    """Return a `data_key` in words: the start of the hash of the train set, or its directory."""
    now, _, *trained = (each if "/" in each else each[:12] for each in key)
    return f"{now}, trained on {' and then on '.join(trained)}" if trained else now


def _replaced_train_set(run: Run) -> tuple[str, ...]:
    """Return a sentence if the run was trained on another train set than the one of its probes."""
    if not run.replaced_train_sets:
        return ()
    *before, last = (one[:12] for one in run.replaced_train_sets)
    if before:
        return (
            f"{run.path} was trained on several train sets, one after the other (manifests {join([*before, last])}), "
            "so it is compared with no run that was trained on one of them alone.",
        )
    return (
        f"{run.path} was trained on another train set (manifest {last}) than its probes read, so it is compared with "
        "no run that was trained on the present one; train it again, or put the old train set back and repeat the "
        "probes.",
    )


def _probed_earlier(run: Run) -> tuple[str, ...]:
    """Return a sentence if labels were probed only at steps before the last probed one, which a report shows."""
    sentences = []
    for probes in run.readouts.values():  # of each protocol
        steps = {space: step for step, found in sorted(probes.items()) for space in found if step > 0}
        last = max(steps.values(), default=0)
        earlier = {space: step for space, step in steps.items() if step != last}
        if earlier:
            labels = join([f"label_{space} at step {earlier[space]}" for space in label_order(earlier)])
            sentences.append(
                f"Not shown: {run.path} was probed on {labels}, and last on other labels at step {last}; probe all "
                "there."
            )
    return tuple(dict.fromkeys(sentences))


def _left_out(run: Run) -> tuple[str, ...]:
    """Return a sentence if the training left out samples or steps, by the last logged counts."""
    counts = {
        f"{num:,.0f} {what}": num
        for key, what in (("data/bad_samples", "bad samples"), ("train/skipped_steps", "steps"))
        if (num := next(reversed(run.logged(key).values()), 0.0)) > 0
    }
    return (f"The training of {run.path} left out {join(list(counts))}.",) if counts else ()


def _edited_config(run_dir: RunDir, config: RunConfig) -> tuple[str, ...]:
    """Return a sentence if config.json of a run is not the config with which it was trained."""
    sentence = edited_config(run_dir, config)
    return () if sentence is None else (f"{sentence}; this page believes {run_dir.config.name}.",)


def labels_of(runs: Iterable[Run]) -> list[LabelSpace]:
    """Return the labels for which the runs have results of any probe, in the order in which a report shows them."""
    readouts = (probes for run in runs for probes in run.readouts.values())
    return label_order(space for probes in readouts for of_step in probes.values() for space in of_step)


def protocol_of(config: ProbeConfig) -> ProbeConfig:
    """Return the settings that make accuracies comparable: all of the probe except the seed and the online probe."""
    return config.protocol.model_copy(update={"seed": 0})


def _read_readouts(
    places: Sequence[RunDir], run_dir: RunDir, identity: str | None
) -> tuple[dict[ProbeConfig, Probes], tuple[str, ...]]:
    """Read the results by protocol, step and label. If there are several of one kind, the first counts.

    The protocol is read from the content of a file, not from its name. Leaves out results of another run than
    `identity`, and returns a sentence for each place that holds some.
    """
    problems: dict[Path, str] = {}
    readouts: dict[ProbeConfig, dict[int, dict[LabelSpace, ProbeResult]]] = {}
    for place in places:
        for step in place.probe_steps():
            for space in labels_in(place.probes(step), suffix=None):
                for result in _results_in(place.probes(step), space, step):
                    if result.is_of_other_run(identity):
                        problems[place.all_probes] = f"Left out: {of_other_run(place, run_dir, result)}"
                        continue
                    of_step = readouts.setdefault(protocol_of(result.probe_config), {}).setdefault(step, {})
                    of_step.setdefault(space, result)
    return {**readouts}, tuple(problems.values())


def of_other_run(place: RunDir, run_dir: RunDir, result: ProbeResult) -> str:
    """Return a sentence on a result of another run than `run_dir` in the directory of its results."""
    return (
        f"{place.all_probes} holds probe results of another run ({result.run}) than {run_dir.path}; probe this one "
        "with an --out of its own."
    )


def _of_one_dataset(
    readouts: Mapping[ProbeConfig, Probes], run_dir: RunDir, *, protocol: ProbeConfig
) -> tuple[dict[ProbeConfig, Probes], tuple[str, ...]]:
    """Return the results on the data of the last step, and a sentence if there are others, which are left out.

    If the last step has results on several data, those of `protocol`, the run's own, count.
    """
    results = [one for probes in readouts.values() for of_step in probes.values() for one in of_step.values()]
    if len({one.data for one in results}) < 2:
        return {**readouts}, ()
    last = max(results, key=lambda one: (one.checkpoint_step, protocol_of(one.probe_config) == protocol))
    kept: dict[ProbeConfig, Probes] = {}
    for of_protocol, probes in readouts.items():
        of_steps = {
            step: of_data
            for step, of_step in probes.items()
            if (of_data := {space: one for space, one in of_step.items() if one.data == last.data})
        }
        kept |= {of_protocol: of_steps} if of_steps else {}
    steps = sorted({one.checkpoint_step for one in results if one.data != last.data})
    return kept, (
        f"Left out: the probes of {run_dir.path} at step {', '.join(map(str, steps))} were made on other data than "
        f"{'others' if last.checkpoint_step in steps else 'that'} of step {last.checkpoint_step}; repeat them.",
    )


def _results_in(directory: Path, space: LabelSpace, step: int) -> Iterator[ProbeResult]:
    """Yield the results of one label at one step, first the one with the run's own protocol."""
    paths = [*directory.glob(f"{space}.json"), *directory.glob(f"{space}-*.json")]
    for path in sorted(paths, key=lambda path: (len(path.name), path)):
        result = read_result(path)
        if (result.label, result.checkpoint_step) != (space, step):
            raise UserError(
                f"{path} is a result of label_{result.label} at step {result.checkpoint_step}, but its place is for "
                f"label_{space} at step {step}; move it back, or remove it"
            )
        yield result


def _read_views(run_dir: RunDir, options: AnalysisOptions | None, *, test_set: str | None) -> Views:
    """Return the grid of views, made now if there are `options` for that and none of the newest checkpoint is there.

    If it cannot be made now from the same test set, an earlier one stays. `test_set` is the hash of the test set of the
    probes, of which the views have to be, if it is known.
    """
    earlier: Views | None = None
    json_path, png_path = run_dir.analysis / "views.json", run_dir.analysis / "views.png"
    try:
        if json_path.is_file() and png_path.is_file():
            result = ViewsResult.parse(read_object(json_path, mend=_MEND_ANALYSIS), where=str(json_path))
            _check_test_set(json_path, result.test_manifest_sha256, test_set)
            earlier = Views(_read_png(png_path), result)
            test_set = result.test_manifest_sha256
            if options is None or _is_current(run_dir, json_path, step=result.checkpoint_step):
                return earlier
        if options is None:
            return Views(None, None, f"made by `python -m trainer.analyze views {run_dir.path}`")
        result, png = measure_views(run_dir, options=options)
    except UserError as error:
        return earlier or Views(None, None, str(error))
    if earlier is not None and result.test_manifest_sha256 != test_set:
        return earlier
    try:
        write_result(run_dir, "views", result, png)
    except OSError as error:  # the next report can make it again
        problem = storage_problem(error)
        if problem is None:
            raise
        logger.info("the views of %s are not saved: %s", run_dir.path, problem)
    return Views(png, result)


def _is_current(run_dir: RunDir, path: Path, *, step: int) -> bool:
    """Return whether the result at `path`, of the checkpoint of `step`, is of the newest one or was made after it.

    A result of an earlier checkpoint that was made after the newest one is there because somebody chose that step.
    """
    return step >= (run_dir.latest_step() or 0) or path.stat().st_mtime_ns > run_dir.latest.stat().st_mtime_ns


_MEND_ANALYSIS = "remove it, or run `python -m trainer.analyze` again"


def _check_test_set(path: Path, found: Any, test_set: str | None) -> None:
    """Raise `UserError` if the result at `path` records another test set than the one of the probes."""
    if test_set is not None and isinstance(found, str) and found != test_set:
        raise UserError(
            f"{path} is of another test set (manifest {found[:12]}) than the probes ({test_set[:12]}); run "
            f"`python -m trainer.analyze {path.stem} {path.parent.parent}` again"
        )


def _read_pictures(run_dir: RunDir, *, test_set: str | None) -> tuple[tuple[Picture, ...], tuple[str, ...]]:
    """Return the pictures of all analyses except the views, and a sentence for each that is left out.

    Left out are damaged ones, and those of another test set than `test_set`, that of the probes.
    """
    pictures, problems = [], []
    for path in sorted(run_dir.analysis.glob("*.png")):
        json_path = path.with_suffix(".json")
        if path.stem == "views":
            continue
        try:
            result = read_object(json_path, mend=_MEND_ANALYSIS) if json_path.exists() else {}
            _check_test_set(json_path, result.get("test_manifest_sha256"), test_set)
            pictures.append(Picture(path.stem, _read_png(path), _numbers(result)))
        except UserError as error:
            problems.append(f"Left out: {error}.")
    return tuple(pictures), tuple(problems)


_PNG = b"\x89PNG\r\n\x1a\n"


def _read_png(path: Path) -> bytes:
    content = path.read_bytes() if path.is_file() else b""
    if not content.startswith(_PNG):
        raise UserError(f"{path} is no PNG picture; remove it")
    return content


_DEEPEST = 8  # levels of a result that are shown
_LONGEST = 60  # characters of a value that are shown


def _numbers(value: Any, path: str = "", *, depth: int = 0) -> dict[str, str]:
    """Return the numbers of a result by their dotted paths, without long lists, hashes and settings."""
    if depth > _DEEPEST:
        return {}
    if isinstance(value, dict):
        items = [(key, inner) for key, inner in value.items() if key != "config" and not key.endswith("sha256")]
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        items = [(str(number), inner) for number, inner in enumerate(value, 1)]
    elif isinstance(value, list):
        return {path: ", ".join(map(_short, value))} if 0 < len(value) <= 12 else {}
    else:
        return {path: _short(value)}
    return {
        name: text
        for key, inner in items
        for name, text in _numbers(inner, f"{path}.{key}".removeprefix("."), depth=depth + 1).items()
    }


def _short(value: Any) -> str:
    """Return a value as text. In results, null stands for a number that is not finite or was not measured."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return NO_NUMBER
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _unique_names(directories: Sequence[RunDir], configs: Sequence[RunConfig]) -> list[str]:
    """Return for each run the first of these that is unique: its name, name and seed, directory name, path."""
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
    """Return for each arm the name in its configs, or the names of its runs if another arm has the same name."""
    names = [" / ".join(dict.fromkeys(run.config.name for run in runs)) for runs in groups]
    return [
        name if names.count(name) == 1 else ", ".join(run.name for run in runs)
        for name, runs in zip(names, groups, strict=True)
    ]
