"""Read run directories for a report: configs, provenance, logged curves, probe results and pictures."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from data_pipeline.core.errors import UserError
from trainer.analyses.views import ViewsResult
from trainer.config import RunConfig, read_run_config
from trainer.config_changes import edited_config
from trainer.probes.features import LabelSpace
from trainer.probes.linear import ProbeConfig
from trainer.probes.result import ProbeResult, results_in
from trainer.provenance import RECORDED_LABELS, train_sets
from trainer.reports.config_identity import run_identity
from trainer.run_dir import RunDir, open_run, read_object, steps_in

logger = logging.getLogger(__name__)

Scored: TypeAlias = Mapping[Path, Sequence[ProbeResult]]
"""The results of encoders that are not those of runs on their own data, by directory."""

LOGGED = ("train/loss", "train/viewmaker_loss", "perf/samples_per_second", "perf/data_wait_fraction")
_LEFT_OUT = {"data/bad_samples": "bad samples", "train/skipped_steps": "steps"}
_MEND_ANALYSIS = "remove it, or run `python -m trainer.analyze` again"


@dataclass(frozen=True)
class Picture:
    """The picture of an analysis, such as the views, and a caption."""

    name: str
    png: bytes
    caption: str = ""


@dataclass(frozen=True)
class Run:
    """The parts of a run that a report shows.

    results: the probe results of all steps, labels and protocols, measured on one dataset.
    logged: the values of `LOGGED` metrics and of online probes by step.
    problems: sentences that name what was left out, and replaced data.
    """

    name: str
    path: Path
    config: RunConfig
    provenance: Mapping[str, Any]
    results: tuple[ProbeResult, ...] = ()
    logged: Mapping[str, Mapping[int, float]] | None = None
    pictures: tuple[Picture, ...] = ()
    problems: tuple[str, ...] = ()

    def by_step(self, metric: str) -> Mapping[int, float]:
        """Return the logged values of a metric by step; empty if it was never logged."""
        return (self.logged or {}).get(metric, {})

    @property
    def finished_step(self) -> int | None:
        """Return the last step of the training; None if it has not ended."""
        return self.provenance.get("finished_step")

    @property
    def trained_on(self) -> tuple[str, ...]:
        """Return the hashes of the train sets of the training, oldest first; empty if none is recorded."""
        return train_sets(self.config, self.provenance)

    @property
    def has_other_train_set(self) -> bool:
        """Return whether the run was trained on another train set than the one of its probes, or on several."""
        probed = {result.train_manifest_sha256 for result in self.results} or set(self.trained_on[-1:])
        return bool(self.trained_on) and {*self.trained_on} != probed

    @property
    def data_name(self) -> str:
        """Return the name of the train set's directory, or of the one above train/; "birds+photos" of a mixture."""
        train_dir = self.config.data.train_dir
        return "+".join(self.config.data.train_locations) if train_dir is None else name_of_data(train_dir)


def name_of_data(train_dir: str) -> str:
    """Return the name of the train set's directory, or of the one above train/."""
    parts = train_dir.rstrip("/").split("/")
    return parts[-2] if len(parts) > 1 and parts[-1] == "train" else parts[-1]


def read_scored(paths: Sequence[Path]) -> Scored:
    """Return the results of encoders that are not those of runs on their own data, by directory.

    A path is that of such a directory, or of one that holds several, or of a run, which has one for each other data and
    step.
    """
    inner = {path: "probes/data_*/step_*" if RunDir(path).config.is_file() else "*/" for path in paths}
    places = [place for path, below in inner.items() for place in [path, *sorted(path.glob(below))]]
    found = {place: results_in(place) for place in places if not RunDir(place).config.is_file()}
    return {place: results for place, results in found.items() if results and results[0].scored is not None}


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read every run.

    A path that is named twice is read once. Raises `UserError` if a path is not a run directory, or holds a damaged
    config or result.
    """
    once: dict[Path, Path] = {}
    for path in paths:
        once.setdefault(path.resolve(), path)
    directories = [open_run(path) for path in once.values()]
    configs = [read_run_config(run_dir) for run_dir in directories]
    names = _unique_names(directories, configs)
    return [_read_run(run_dir, config, name) for run_dir, config, name in zip(directories, configs, names, strict=True)]


def protocol_of(config: ProbeConfig) -> ProbeConfig:
    """Return the settings that make accuracies comparable: all of the probe except the seed and the online probe."""
    return config.protocol.model_copy(update={"seed": 0})


def _read_run(run_dir: RunDir, config: RunConfig, name: str) -> Run:
    metrics, provenance = run_dir.read_metrics(), run_dir.read_provenance()
    results, problems = _read_results(run_dir, config, identity=run_identity(config, provenance))
    test_set = next((result.test_manifest_sha256 for result in results), None)
    pictures, more = _read_pictures(run_dir, test_set=test_set)
    run = Run(name, run_dir.path, config, provenance, results, _logged(metrics), pictures)
    problems += more
    if run.has_other_train_set:
        sets = ", ".join(sha256[:12] for sha256 in run.trained_on)
        problems.append(f"{run.path} was trained on another train set (manifest {sets}) than its probes read.")
    if (edited := edited_config(run_dir, config)) is not None:
        problems.append(f"{edited}; this page believes {run_dir.config.name}.")
    if provenance.get(RECORDED_LABELS) == []:
        problems.append(
            f"{config.data.test_dir} or the train set has no label, so there is nothing to probe in {run_dir.path}; "
            "probe its encoder on data with labels, by `python -m trainer.probe RUN_DIR --train DIR --test DIR`."
        )
    for metric, what in _LEFT_OUT.items():
        if last := next((entry[metric] for entry in reversed(metrics) if metric in entry), 0):
            problems.append(f"The training of {run.path} left out {last:,.0f} {what}.")
    for problem in problems:
        logger.warning("%s", problem)
    return replace(run, problems=tuple(problems))


def _logged(entries: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for entry in entries:
        for name, value in entry.items():
            if name in LOGGED or name.startswith("probe/"):
                found.setdefault(name, {})[entry["step"]] = value
    return found


def _read_results(
    run_dir: RunDir, config: RunConfig, *, identity: str | None
) -> tuple[tuple[ProbeResult, ...], list[str]]:
    """Return the results of a run on the data of its last step, and sentences on others, which are left out."""
    found: dict[tuple[LabelSpace, int, ProbeConfig], ProbeResult] = {}
    others: dict[str, None] = {}
    # Of each label the result with the run's own protocol comes first.
    for result in (one for step in steps_in(run_dir.all_probes) for one in results_in(run_dir.probes(step))):
        if result.is_of_other_run(identity):
            others[
                f"Left out: {run_dir.all_probes} holds results of another run ({result.run}); probe this run again."
            ] = None
        else:
            found.setdefault((result.label, result.checkpoint_step, protocol_of(result.probe_config)), result)
    results = tuple(found.values())
    if not results:
        return (), list(others)
    own = protocol_of(config.probe)
    last = max(results, key=lambda result: (result.checkpoint_step, protocol_of(result.probe_config) == own))
    of_other_data = sorted({result.checkpoint_step for result in results if result.data != last.data})
    said = [
        f"Left out: probes of {run_dir.path} at step {step} were made on other data than the last; repeat them."
        for step in of_other_data
    ]
    return tuple(result for result in results if result.data == last.data), [*others, *said]


def _read_pictures(run_dir: RunDir, *, test_set: str | None) -> tuple[tuple[Picture, ...], list[str]]:
    """Return the views and the pictures of the other analyses, and a sentence for each that is left out."""
    pictures: list[Picture] = []
    problems: list[str] = []
    for path in sorted(run_dir.analysis.glob("*.png"), key=lambda path: (path.stem != "views", path)):
        try:
            result = _read_analysis(path, test_set)
            caption = _views_caption(result, path) if path.stem == "views" else f"step {result.get('checkpoint_step')}"
            pictures.append(Picture(path.stem, path.read_bytes(), caption))
        except UserError as error:
            problems.append(f"Left out: {error}.")
    return tuple(pictures), problems


def _views_caption(result: dict[str, Any], png_path: Path) -> str:
    views = ViewsResult.parse(result, where=str(png_path.with_suffix(".json")))
    change = "— no number" if views.change is None else f"{views.change:.4f}"
    caption = f"{views.views}, step {views.checkpoint_step}; mean change of a pixel {change}"
    return f"{caption}; differences × {views.difference_gain} around middle grey"


def _read_analysis(png_path: Path, test_set: str | None) -> dict[str, Any]:
    """Return the numbers beside a picture; none for a picture without them.

    Raises `UserError` if they are of another test set than that of the probes.
    """
    path = png_path.with_suffix(".json")
    result = read_object(path, mend=_MEND_ANALYSIS) if path.exists() else {}
    found = result.get("test_manifest_sha256")
    if test_set is not None and isinstance(found, str) and found != test_set:
        raise UserError(
            f"{path} is of another test set (manifest {found[:12]}) than the probes ({test_set[:12]}); run "
            f"`python -m trainer.analyze {path.stem} {path.parent.parent}` again"
        )
    return result


def _unique_names(directories: Sequence[RunDir], configs: Sequence[RunConfig]) -> list[str]:
    """Return for each run the first of these that is unique: its name, name and seed, directory name, path."""
    candidates = [
        [config.name for config in configs],
        [f"{config.name}, seed {config.seed}" for config in configs],
        [run_dir.path.resolve().name for run_dir in directories],
        [str(run_dir.path) for run_dir in directories],
    ]
    counts = [Counter(names) for names in candidates]
    return [
        next(names[number] for names, count in zip(candidates, counts, strict=True) if count[names[number]] == 1)
        for number in range(len(directories))
    ]
