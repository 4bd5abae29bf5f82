"""Read the runs of the benchmark, and put them into its cells by their factors.

Only small files are read: config.json, provenance.json, the probe results of the last step and of step 0,
analysis/monitors.json, and the metrics of a run with online probes. Invariant: a cell holds finished runs that were
trained and probed on one dataset, with one probe protocol, one for each seed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from data_pipeline.core.errors import UserError
from trainer.analyses.monitors import MonitorsResult
from trainer.config import RunConfig, read_run_config
from trainer.probes.curve import online_readings
from trainer.probes.features import LabelSpace
from trainer.probes.linear import ProbeConfig
from trainer.probes.result import ProbeResult, labels_in, read_result
from trainer.probes.right_samples import unpack_right
from trainer.provenance import RECORDED_NUM_TEST_SAMPLES, train_sets
from trainer.records import read_provenance
from trainer.reports.config_identity import config_identity, run_identity
from trainer.reports.paired import Reading
from trainer.reports.rises import online_num_test
from trainer.reports.runs import of_other_run, protocol_of
from trainer.run_dir import RunDir, open_run, places_of_probes, read_object

CEILING = "ceiling: "  # begins the name of a cure that is no cure: the encoder trained with the label that follows
OF_PIXELS = "-reads_pixels"  # ends the name of a result of `trainer.probe --pixels`
FACTORS = ("setting", "difficulty", "cure")  # that a run of the benchmark has

Results = Mapping[LabelSpace, ProbeResult]


@dataclass(frozen=True)
class StudyRun:
    """A run with its factors, its final and untrained probe results, and its monitors.

    is_finished: whether the training came to its end.
    monitors: of the last checkpoint, on the test set of the probes; None if there are none.
    online: accuracies in [0, 1] of the online probe (ridge regression) by label, then by step.
    pixels: the same probe on the raw pixels, without an encoder (`trainer.probe --pixels`).
    trained: the results of the last checkpoint; empty if it was not probed, or if the training is not finished.
    trained_on: the hashes of the train sets of the training, oldest first; empty if they are not recorded.
    num_test_samples: the size of the test set at the training; None if it is not recorded.
    problems: sentences on results of other runs, which were left out.
    """

    path: Path
    config: RunConfig
    is_finished: bool
    trained: Results
    untrained: Results
    pixels: Results
    monitors: MonitorsResult | None
    online: Mapping[LabelSpace, Mapping[int, float]]
    trained_on: tuple[str, ...]
    num_test_samples: int | None = None
    problems: tuple[str, ...] = ()

    @property
    def factors(self) -> Mapping[str, str]:
        return self.config.tracking.factors

    @property
    def seed(self) -> int:
        return self.config.seed

    def online_num_test(self, label: LabelSpace) -> int:
        """Return the number of test samples with a label that the online probe reads."""
        result = self.trained.get(label) or self.untrained.get(label)
        return online_num_test(self.config.probe, num_test=self.num_test_samples, result=result)


@dataclass(frozen=True)
class Setting:
    """A dataset in which the labels `easy` suppress the labels `hard`, at several difficulties.

    difficulties: as the runs name them, from the easiest for the hard labels; numbers are sorted.
    unit: the unit of the difficulty, such as "bits".
    cures: the names of the cures, in the order of their first run, without ceilings.
    cells: the finished and probed runs by difficulty and cure (ceilings too), then by seed.
    seeds: all seeds of its runs.
    """

    name: str
    unit: str
    hard: tuple[LabelSpace, ...]
    easy: tuple[LabelSpace, ...]
    difficulties: tuple[str, ...]
    cures: tuple[str, ...]
    seeds: tuple[int, ...]
    cells: Mapping[tuple[str, str], Mapping[int, StudyRun]]

    @property
    def labels(self) -> tuple[LabelSpace, ...]:
        """The hard labels, then the easy ones."""
        return (*self.hard, *(label for label in self.easy if label not in self.hard))

    @property
    def middle(self) -> str:
        return self.difficulties[len(self.difficulties) // 2]

    @property
    def easiest(self) -> str:
        return self.difficulties[0]

    @property
    def has_one(self) -> bool:
        """Whether there is only one difficulty, so that it needs no name."""
        return len(self.difficulties) == 1

    def with_unit(self, difficulty: str) -> str:
        """Return a difficulty with its unit, such as "10 bits" or "correlation 0.9"."""
        if self.unit == "correlation":
            return f"{self.unit} {difficulty}"
        return f"{difficulty} {self.unit}".strip()

    def at(self, difficulty: str) -> str:
        """Return a difficulty as the end of a title, such as ", 10 bits"; nothing if there is only one."""
        return "" if self.has_one else f", {self.with_unit(difficulty)}"

    def runs(self, difficulty: str, cure: str) -> Mapping[int, StudyRun]:
        return self.cells.get((difficulty, cure), {})

    def readings(self, difficulty: str, cure: str, label: LabelSpace) -> dict[int, Reading]:
        """Return the linear probe of a label by seed."""
        runs = self.runs(difficulty, cure)
        return {seed: reading(run.trained[label]) for seed, run in runs.items() if label in run.trained}

    def ceiling(self, difficulty: str, label: LabelSpace) -> dict[int, Reading]:
        return self.readings(difficulty, CEILING + label, label)

    def untrained(self, difficulty: str, label: LabelSpace) -> dict[int, Reading]:
        """Return the untrained encoder by seed, of the first cure that has it."""
        found: dict[int, Reading] = {}
        for cure in self.cures:
            for seed, run in self.runs(difficulty, cure).items():
                if label in run.untrained:
                    found.setdefault(seed, reading(run.untrained[label]))
        return found

    def pixels(self, difficulty: str, label: LabelSpace) -> dict[int, Reading]:
        """Return the probe of the raw pixels by seed, of the first run that has it, ceilings included."""
        found: dict[int, Reading] = {}
        for (of_difficulty, _), runs in self.cells.items():
            for seed, run in runs.items():
                if of_difficulty == difficulty and label in run.pixels:
                    found.setdefault(seed, reading(run.pixels[label]))
        return found

    def labels_at(self, difficulty: str) -> tuple[LabelSpace, ...]:
        """Return the labels on which a run of a difficulty was probed; it may not have all, such as one of no bits."""
        runs = [run for (of, _), by_seed in self.cells.items() if of == difficulty for run in by_seed.values()]
        return tuple(label for label in self.labels if any(label in run.trained for run in runs))

    def lacking(self, label: LabelSpace) -> tuple[StudyRun, ...]:
        """Return the runs that were not probed on a label, although others of their difficulty were."""
        return tuple(
            run
            for (difficulty, _), by_seed in self.cells.items()
            if label in self.labels_at(difficulty)
            for run in by_seed.values()
            if label not in run.trained
        )

    def chance(self, difficulty: str, label: LabelSpace) -> float | None:
        """Return one over the number of classes; None if no run was probed on the label."""
        results = (
            run.trained[label]
            for (of_difficulty, _), runs in self.cells.items()
            for run in runs.values()
            if of_difficulty == difficulty and label in run.trained
        )
        return next((result.chance for result in results), None)

    def title_and_kind(self, label: LabelSpace) -> str:
        """Return the title of a label with its kind, such as "digit (hard)"."""
        return f"{self.title(label)} ({'hard' if label in self.hard else 'easy'})"

    def title(self, label: LabelSpace) -> str:
        """Return the manifest's title of a label, such as "digit", or else its name."""
        results = (run.trained.get(label) for runs in self.cells.values() for run in runs.values())
        return next((result.title for result in results if result is not None and result.title), label)


@dataclass(frozen=True)
class Gaps:
    """The runs that the page lacks, each list sorted by path.

    num_absent: the seeds that have no run directory, of the cells (setting x difficulty x cure) that have one.
    absent_cells: the cells without any run directory, in words. A cure without any run in a setting is none of them.
    without_label: by label, the runs that are probed on other labels only; see `Setting.lacking`.
    problems: sentences on runs that were left out.
    """

    num_absent: int = 0
    absent_cells: tuple[str, ...] = ()
    unfinished: tuple[Path, ...] = ()
    unprobed: tuple[Path, ...] = ()
    without_label: Mapping[LabelSpace, tuple[Path, ...]] = field(default_factory=dict)
    without_monitors: tuple[Path, ...] = ()
    without_untrained: tuple[Path, ...] = ()  # one run for each setting, difficulty and seed that lacks it
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Benchmark:
    """Everything that the page shows: the settings in the order of their names, and what is missing."""

    settings: tuple[Setting, ...]
    gaps: Gaps
    num_runs: int
    protocol: ProbeConfig | None = field(default=None)

    @property
    def cures(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cure for setting in self.settings for cure in setting.cures))


def reading(result: ProbeResult) -> Reading:
    """Return the linear probe of a result, with its single samples if they are known and agree with its accuracy."""
    text = result.right_samples.get("linear")
    right_N = None if text is None else unpack_right(text, num_test=result.num_test)
    if right_N is not None and round(result.linear.accuracy * result.num_test) != int(right_N.sum()):
        right_N = None
    return Reading(result.linear.accuracy, result.num_test, right_N)


def read_benchmark(paths: Sequence[Path], *, probes_at: Path | None = None) -> Benchmark:
    """Read the run directories of a suppression study.

    probes_at: a directory with further probe results, as for `trainer.reports.runs.read_runs`.

    Raises `UserError` if no run has the factors, if two runs fill one place, or if a file is damaged.
    """
    directories = [open_run(path) for path in paths]
    elsewhere = directories if probes_at is None else places_of_probes(directories, probes_at)
    runs = [_read(own, other) for own, other in zip(directories, elsewhere, strict=True)]
    placed = [run for run in runs if all(name in run.factors for name in FACTORS)]
    if not placed:
        raise UserError(
            f"no run of {', '.join(map(str, paths[:3]))} has the factors {', '.join(FACTORS)} (tracking.factors) of a "
            "suppression study; leave out --study"
        )
    problems = [
        f"{run.path} lacks a factor ({', '.join(name for name in FACTORS if name not in run.factors)})."
        for run in runs
        if run not in placed
    ]
    problems += [problem for run in placed for problem in run.problems]
    placed, of_other_monitors = _with_alike_monitors(placed)
    problems += of_other_monitors
    protocols = Counter(
        protocol_of(result.probe_config)
        for run in placed
        for result in [*run.trained.values(), *run.untrained.values()]
    )
    protocol = max(protocols, key=lambda one: protocols[one]) if protocols else None
    by_setting: dict[str, list[StudyRun]] = {}
    for run in placed:
        by_setting.setdefault(run.factors["setting"], []).append(run)
    settings = []
    for name, of_setting in by_setting.items():
        setting, said = _setting(name, of_setting, protocol)
        settings.append(setting)
        problems += said
    return Benchmark(tuple(settings), _gaps(placed, settings, problems), len(placed), protocol)


def _with_alike_monitors(runs: Sequence[StudyRun]) -> tuple[list[StudyRun], list[str]]:
    """Return the runs with monitors of the settings of most runs only, and sentences on the others."""
    counts = Counter(run.monitors.config for run in runs if run.monitors is not None)
    usual = max(counts, key=lambda one: counts[one], default=None)
    kept, problems = [], []
    for run in runs:
        is_other = run.monitors is not None and run.monitors.config != usual
        kept.append(replace(run, monitors=None) if is_other else run)
        problems += [f"The monitors of {run.path} were measured with other settings than most."] if is_other else []
    return kept, problems


def _read(run_dir: RunDir, probes_of: RunDir) -> StudyRun:
    config = read_run_config(run_dir)
    provenance = read_provenance(run_dir.provenance).facts
    finished = provenance.get("finished_step")
    identity = run_identity(config, provenance)
    problems: dict[Path, str] = {}

    def results(step: object, *, suffix: str = "") -> Results:
        for place in (probes_of, run_dir):
            found = _results(place, step, suffix=suffix)
            others = [result for result in found.values() if result.is_of_other_run(identity)]
            if others:
                problems[place.all_probes] = of_other_run(place, run_dir, others[0])
            elif found:
                return found
        return {}

    final = results(finished)
    monitors_at = run_dir.analysis / "monitors.json"
    monitors = None
    if monitors_at.is_file():
        mend = "remove it, or run `python -m trainer.analyze monitors` again"
        monitors = MonitorsResult.parse(read_object(monitors_at, mend=mend), where=str(monitors_at))
    return StudyRun(
        path=run_dir.path,
        config=config,
        is_finished=finished is not None,
        trained=final,
        untrained=results(0),
        pixels=results(0, suffix=OF_PIXELS),
        monitors=monitors if monitors is not None and _is_of(monitors, final, step=finished) else None,
        online=_online(run_dir) if config.probe.online_every_steps is not None else {},
        trained_on=train_sets(config, provenance),
        num_test_samples=provenance.get(RECORDED_NUM_TEST_SAMPLES),
        problems=tuple(problems.values()),
    )


def _online(run_dir: RunDir) -> dict[LabelSpace, dict[int, float]]:
    accuracies: dict[LabelSpace, dict[int, float]] = {}
    for label, method, step, accuracy in online_readings(run_dir.read_metrics()):
        if method == "online_ridge":
            accuracies.setdefault(label, {})[step] = accuracy
    return accuracies


def _is_of(monitors: MonitorsResult, results: Results, *, step: object) -> bool:
    """Return whether monitors were measured at a step, and on the test set of the probes, if there are any."""
    test_sets = {result.test_manifest_sha256 for result in results.values()}
    return monitors.checkpoint_step == step and test_sets <= {monitors.test_manifest_sha256}


def _results(run_dir: RunDir, step: object, *, suffix: str = "") -> Results:
    """Return the results of a step with the run's own protocol, or with a change that `suffix` names; none for None."""
    if not isinstance(step, int):
        return {}
    directory = run_dir.probes(step)
    return {label: read_result(directory / f"{label}{suffix}.json") for label in labels_in(directory, suffix=suffix)}


def _setting(name: str, runs: Sequence[StudyRun], protocol: ProbeConfig | None) -> tuple[Setting, list[str]]:
    """Return a setting with its cells, and sentences on results that were left out."""
    problems: list[str] = []
    cells: dict[tuple[str, str], dict[int, StudyRun]] = {}
    taken: dict[tuple[str, str, int], StudyRun] = {}
    data_of = _usual_data(runs)
    for run in runs:
        difficulty, cure = run.factors["difficulty"], run.factors["cure"]
        place = (difficulty, cure, run.seed)
        if place in taken:
            raise UserError(
                f"{taken[place].path} and {run.path} are both {name} at {difficulty} with {cure} and seed {run.seed}; "
                "leave one out"
            )
        taken[place] = run
        of_cell = cells.setdefault((difficulty, cure), {})
        if of_cell and config_identity(next(iter(of_cell.values())).config) != config_identity(run.config):
            problems.append(f"{run.path} differs from the other seeds of its cell in more than the seed.")
            continue
        if not run.trained:
            continue
        results = [*run.trained.values(), *run.untrained.values()]
        if any(protocol_of(result.probe_config) != protocol for result in results):
            problems.append(f"{run.path} was probed with other settings than most runs.")
        elif any(_data(result) != data_of[difficulty] for result in [*results, *run.pixels.values()]):
            problems.append(f"{run.path} was probed on other data than most runs of {name} at {difficulty}.")
        elif set(run.trained_on) - {data_of[difficulty][0]}:
            problems.append(f"{run.path} was trained on another train set than its probes read.")
        else:
            of_cell[run.seed] = run
    first = runs[0].factors
    cures = dict.fromkeys(run.factors["cure"] for run in runs)
    setting = Setting(
        name=name,
        unit=first.get("unit", ""),
        hard=_labels(first.get("hard", "base")),
        easy=_labels(first.get("easy", "overlay")),
        difficulties=_sorted(runs),
        cures=tuple(cure for cure in cures if not cure.startswith(CEILING)),
        seeds=tuple(sorted({run.seed for run in runs})),
        cells=cells,
    )
    return setting, problems


def _usual_data(runs: Sequence[StudyRun]) -> dict[str, tuple[str, str]]:
    """Return the hashes of the data of most probes, by difficulty."""
    counts: dict[str, Counter[tuple[str, str]]] = {}
    for run in runs:
        count = counts.setdefault(run.factors["difficulty"], Counter())
        count.update(_data(result) for result in run.trained.values())
    return {difficulty: count.most_common(1)[0][0] for difficulty, count in counts.items() if count}


def _data(result: ProbeResult) -> tuple[str, str]:
    return result.train_manifest_sha256, result.test_manifest_sha256


def _without_untrained(setting: Setting) -> list[Path]:
    """Return a run of each difficulty and seed of which no run has the probe of its untrained encoder."""
    first: dict[tuple[str, int], Path] = {}
    present: set[tuple[str, int]] = set()
    for (difficulty, _), runs in setting.cells.items():
        for seed, run in runs.items():
            first.setdefault((difficulty, seed), run.path)
            present |= {(difficulty, seed)} if run.untrained else set()
    return [path for place, path in first.items() if place not in present]


def _labels(text: str) -> tuple[LabelSpace, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def number_of(difficulty: str) -> float | None:
    """Return a difficulty as a number; None if it is a word."""
    try:
        number = float(difficulty)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _sorted(runs: Sequence[StudyRun]) -> tuple[str, ...]:
    """Return the difficulties of a setting from the easiest: numbers in order, words as they come.

    The factor `easiest` names the easiest, which need not be among them; without it, this is the lowest number.
    """
    texts = list(dict.fromkeys(run.factors["difficulty"] for run in runs))
    easiest = next((run.factors["easiest"] for run in runs if "easiest" in run.factors), None)
    numbers = {text: number_of(text) for text in texts}
    if any(number is None for number in numbers.values()):
        return tuple(sorted(texts, key=lambda text: text != easiest))
    rising = sorted(texts, key=lambda text: (numbers[text] or 0.0, text))
    of_easiest = None if easiest is None else number_of(easiest)
    falls = of_easiest is not None and of_easiest >= (numbers[rising[-1]] or 0.0)
    return tuple(reversed(rising) if falls else rising)


def _gaps(runs: Sequence[StudyRun], settings: Sequence[Setting], problems: Sequence[str]) -> Gaps:
    present = Counter((run.factors["setting"], run.factors["difficulty"], run.factors["cure"]) for run in runs)
    num_absent, absent_cells = 0, []
    for setting in settings:
        for at, cure in product(setting.difficulties, setting.cures):
            num_present = present[setting.name, at, cure]
            if num_present:
                num_absent += len(setting.seeds) - num_present
            else:
                absent_cells.append(f"{setting.name}{setting.at(at)} with {cure}")
    finished = [run for run in runs if run.is_finished]
    without_label: dict[LabelSpace, tuple[Path, ...]] = {}
    for setting in settings:
        for label in setting.labels:
            if lacking := setting.lacking(label):
                paths = (*without_label.get(label, ()), *(run.path for run in lacking))
                without_label[label] = tuple(sorted(paths))
    return Gaps(
        num_absent=num_absent,
        absent_cells=tuple(absent_cells),
        unfinished=tuple(run.path for run in runs if not run.is_finished),
        unprobed=tuple(run.path for run in finished if not run.trained),
        without_label=without_label,
        without_monitors=tuple(run.path for run in finished if run.monitors is None),
        without_untrained=tuple(path for setting in settings for path in _without_untrained(setting)),
        problems=tuple(problems),
    )
