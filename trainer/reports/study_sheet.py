"""Put runs into the cells of a published table, and compare them with the paper.

Differences are in percentage points, as in the tables. Guarantees: levels are compared only if the run and the paper
trained on the same amount of data, and two different configurations never fill one cell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scipy.stats import spearmanr

from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import as_typed, differing_keys, flatten
from trainer.analyses.concentration import ConcentrationResult
from trainer.config import RunConfig
from trainer.probes.features import LabelSpace
from trainer.probes.linear import ProbeConfig
from trainer.provenance import RECORDED_NUM_SAMPLES, RECORDED_NUM_TEST_SAMPLES
from trainer.reports.config_identity import identity_settings
from trainer.reports.findings import Score, resolution
from trainer.reports.protocols import FITTED_ON, describe_protocol, protocols_of
from trainer.reports.published import PAIRS, Cell, Contrast, Study
from trainer.reports.runs import Run
from trainer.run_dir import RunDir, read_object

Direction = Literal["same", "opposite", "not told from chance", "not measured"]

# Settings of which the results depend by rounding alone, or by which shards are read first. A run of a table may change
# them and still be compared with the paper.
_FREE = (
    "compile.",
    "engine.",
    "precision.",
    "channels_last.",
    "view_forwards.",
    "max_skipped_in_a_row.",
    "memory.encoder_checkpointing.",
    "memory.viewmaker_checkpointing.",
    "objective.chunk_size.",
    "data.shuffle_shards.",
    "data.max_bad_share.",
    "probe.",  # that of the results counts
)
_MOST_NAMED = 4  # settings that differ


@dataclass(frozen=True)
class FilledCell:
    """A cell of the table with the runs that measure it, one for each seed.

    score: the accuracies; None if nothing was measured.
    unlike: how the runs differ from the paper's, in words; empty if levels may be compared.
    num_checkpoints: the number of checkpoints from which the best was taken.
    in_train_mode: the score of a probe with batch norm in train mode, as published; None if there is none.
    """

    cell: Cell
    runs: tuple[Run, ...]
    score: Score | None
    unlike: tuple[str, ...]
    num_checkpoints: int = 1
    in_train_mode: Score | None = None

    @property
    def missing(self) -> str:
        if not self.runs:
            return "not measured: no run"
        return "" if self.score else "not measured: no probe"

    @property
    def difference(self) -> float | None:
        """Our accuracy minus the published one, in points; None if one is missing or only directions compare."""
        return self._less_published(self.score)

    @property
    def difference_in_train_mode(self) -> float | None:
        return self._less_published(self.in_train_mode)

    def _less_published(self, score: Score | None) -> float | None:
        if score is None or self.cell.published is None or self.unlike:
            return None
        return 100 * score.mean - self.cell.published.mean


@dataclass(frozen=True)
class ComparedContrast:
    """A published difference and ours, `points`, which is resolved if it is larger than `resolution`."""

    contrast: Contrast
    name: str
    points: float | None
    resolution: float | None

    @property
    def direction(self) -> Direction:
        if self.points is None or self.resolution is None:
            return "not measured"
        if abs(self.points) <= self.resolution:
            return "not told from chance"
        return "same" if self.points * self.contrast.sign > 0 else "opposite"


@dataclass(frozen=True)
class Sheet:
    """The whole table for one probe protocol. `left_out` are the runs that have no cell."""

    study: Study
    protocol: ProbeConfig
    cells: Mapping[tuple[str, int], FilledCell]
    compared: tuple[ComparedContrast, ...]
    left_out: tuple[Run, ...]


def fill(study: Study, runs: Sequence[Run]) -> Sheet:
    """Put the runs into the cells of `study` by their names, with the results of the protocol of most runs.

    Raises `UserError` if two different runs could fill a cell.
    """
    protocol = _main_protocol(study, runs)
    runs = [run.under(protocol) for run in runs]
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.config.name, []).append(run)
    for name, namesakes in by_name.items():
        if any(cell.run == name for cell in study.cells.values()):
            _check_namesakes(namesakes)
    recipes = study.recipes()
    cells = {
        place: _fill(study, cell, study.columns[place[1]].label, by_name.get(cell.run, []), recipes[cell.run])
        for place, cell in study.cells.items()
    }
    names = {cell.run for cell in study.cells.values()}
    return Sheet(
        study=study,
        protocol=protocol,
        cells=cells,
        compared=tuple(_compare(study, contrast, cells) for contrast in study.contrasts),
        left_out=tuple(run for run in runs if run.config.name not in names),
    )


def _main_protocol(study: Study, runs: Sequence[Run]) -> ProbeConfig:
    """Return the protocol of the sheet, with batch norm in eval mode if possible: train mode has a line of its own."""
    names = {cell.run for cell in study.cells.values()}
    protocols = protocols_of([run for run in runs if run.config.name in names] or runs)
    return next((one for one in protocols if one.batch_norm == "eval"), protocols[0])


def _check_namesakes(runs: Sequence[Run]) -> None:
    first = runs[0]
    for run in runs[1:]:
        differing = differing_keys(identity_settings(first.config), identity_settings(run.config))
        if differing or first.data_key != run.data_key:
            what = ", ".join(differing) or "their data"
            raise UserError(
                f"{first.path} and {run.path} are both called {run.config.name} but differ in {what}; leave one out"
            )
    seeds = [run.config.seed for run in runs]
    for run in runs:
        if seeds.count(run.config.seed) > 1:
            paths = " and ".join(str(other.path) for other in runs if other.config.seed == run.config.seed)
            raise UserError(f"{paths} are the same run, with seed {run.config.seed}; leave one out")


def _fill(study: Study, cell: Cell, label: LabelSpace, runs: Sequence[Run], recipe: RunConfig) -> FilledCell:
    measured = _measured(study, label, runs)
    if not measured:
        return FilledCell(cell, tuple(runs), None, ())
    unlike = list(dict.fromkeys(text for run in runs for text in _unlike(study, cell, label, run, recipe)))
    return FilledCell(
        cell,
        tuple(runs),
        _score(measured),
        tuple(unlike),
        min(found.num_checkpoints for found in measured),
        _in_train_mode(study, label, runs),
    )


def _measured(study: Study, label: LabelSpace, runs: Sequence[Run]) -> list[_Accuracy]:
    return [found for run in runs if (found := _accuracy(study, run, label)) is not None]


def _score(measured: Sequence[_Accuracy]) -> Score:
    return Score(tuple(found.accuracy for found in measured), min(found.num_test for found in measured))


def _in_train_mode(study: Study, label: LabelSpace, runs: Sequence[Run]) -> Score | None:
    if study.measure != "linear" or runs[0].protocol.batch_norm == "train":
        return None
    protocol = in_train_mode(runs[0].protocol)
    measured = _measured(study, label, [run.under(protocol) for run in runs])
    return _score(measured) if measured else None


def in_train_mode(protocol: ProbeConfig) -> ProbeConfig:
    return protocol.model_copy(update={"batch_norm": "train"})


@dataclass(frozen=True)
class _Accuracy:
    accuracy: float
    num_test: int
    num_checkpoints: int


def _accuracy(study: Study, run: Run, label: LabelSpace) -> _Accuracy | None:
    """Return the accuracy as the paper measures it: the linear probe after the last epoch, or the best kNN vote.

    A vote is the same under every protocol of the linear probe that reads the same vectors. Votes during the training
    count if all train samples took part. None if nothing was measured, or if the sizes of the data are not known.
    """
    if study.measure == "linear":
        probe = run.final_probe(label)
        return None if probe is None else _Accuracy(probe.linear.accuracy, probe.num_test, 1)
    probes = [
        by_label[label]
        for protocol, of_protocol in run.readouts.items()
        if protocol.reads == run.protocol.reads
        for step, by_label in of_protocol.items()
        if step > 0 and label in by_label
    ]
    votes = {probe.checkpoint_step: probe.knn.accuracy for probe in probes}
    online = run.config.probe
    if probes:
        num_train, num_test = max(probe.num_train for probe in probes), min(probe.num_test for probe in probes)
    elif (sizes := _recorded_sizes(run)) is not None:
        num_train, num_test = sizes[0], min(sizes[1], online.online_num_test)
    else:
        return None
    is_logged = run.protocol.reads == "features"  # which online probes read
    if is_logged and online.online_num_train >= num_train and online.online_num_test >= num_test:
        votes |= {step: vote for step, vote in run.logged(f"probe/{label}/knn").items() if step > 0}
    return _Accuracy(max(votes.values()), num_test, len(votes)) if votes else None


def _recorded_sizes(run: Run) -> tuple[int, int] | None:
    """Return the sizes of the train set and the test set of the probes; None if the run does not record them."""
    num_train, num_test = (run.provenance.get(name) for name in (RECORDED_NUM_SAMPLES, RECORDED_NUM_TEST_SAMPLES))
    if run.config.data.mixture is not None or num_train is None or num_test is None:
        return None  # of a mixture, a probe reads one source
    return num_train, num_test


def _unlike(study: Study, cell: Cell, label: LabelSpace, run: Run, recipe: RunConfig) -> list[str]:
    """Return the differences between a run and the paper's, in words; other settings only if there is nothing else."""
    config, probe = run.config, run.final_probe(label)
    pairs: list[tuple[int | str, int | str, str]] = [
        (config.encoder.kind, study.encoder, ""),
        (config.num_epochs, cell.num_epochs, " epochs"),
        (config.global_batch_size, study.batch_size, " in a batch"),
    ]
    num_train = probe.num_train if probe is not None else (_recorded_sizes(run) or (None,))[0]
    if num_train is not None:
        pairs.append((num_train, study.num_train, " train samples"))
    if probe is not None and study.measure == "linear":
        pairs.append((probe.probe_config.num_epochs, 100, " epochs of the probe"))
        pairs.append((FITTED_ON[probe.probe_config.views], FITTED_ON["policy"], " in the probe"))
    unlike = [f"{_number(ours)} instead of {_number(theirs)}{unit}" for ours, theirs, unit in pairs if ours != theirs]
    if study.measure == "linear" and probe is not None and not run.is_probed_at_end:
        unlike.append(f"probed at {run.probed_at}")
    elif "finished_step" not in run.provenance:
        unlike.append("a training that has not ended")
    return unlike or _other_settings(study, label, run, recipe)


def _other_settings(study: Study, label: LabelSpace, run: Run, recipe: RunConfig) -> list[str]:
    """Return the settings of a run and of its probe that are not those of the recipe, in words."""
    ours, theirs = _settings(run.config), _settings(recipe)
    if study.measure == "linear" and (probe := run.final_probe(label)) is not None:
        ours |= _settings_of_probe(probe.probe_config)
        theirs |= _settings_of_probe(recipe.probe.protocol)
    different = differing_keys(ours, theirs)
    texts = [
        f"{key} {as_typed(ours.get(key))} instead of {as_typed(theirs.get(key))}" for key in different[:_MOST_NAMED]
    ]
    more = len(different) - len(texts)
    return [*texts, f"{more} other settings"] if more else texts


def _settings(config: RunConfig) -> dict[str, Any]:
    return {key: value for key, value in identity_settings(config).items() if not f"{key}.".startswith(_FREE)}


def _settings_of_probe(protocol: ProbeConfig) -> dict[str, Any]:
    """Return the settings of a probe without the mode of batch norm, which is a part of the sheet."""
    return {f"probe.{key}": value for key, value in flatten(protocol).items() if key != "batch_norm"}


def _number(value: int | str) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _compare(study: Study, contrast: Contrast, cells: Mapping[tuple[str, int], FilledCell]) -> ComparedContrast:
    first, second = cells[contrast.first], cells[contrast.second]
    name = _name(study, contrast)
    if first.score is None or second.score is None:
        return ComparedContrast(contrast, name, None, None)
    points = 100 * (first.score.mean - second.score.mean)
    return ComparedContrast(contrast, name, points, 100 * resolution(first.score, second.score))


def _name(study: Study, contrast: Contrast) -> str:
    """Return "C+Digits, object: viewmaker − expert views", or "CIFAR-10, MoCo: abcde − abcd"."""
    (row, number), (other_row, other_number) = contrast.first, contrast.second
    column, other = study.columns[number], study.columns[other_number]
    if row == other_row:
        return f"{row}, {column.group}: {column.title} − {other.title}"
    return f"{column.group}, {column.title}: {row} − {other_row}"


def summary(sheet: Sheet) -> list[str]:
    """Return sentences on the results of the sheet and on their limits."""
    filled = list(sheet.cells.values())
    measured = [one for one in filled if one.score is not None]
    sentences = [f"{len(measured)} of the {len(filled)} cells are measured."]
    unlike = list(dict.fromkeys(text for one in measured for text in one.unlike))
    if unlike and all(one.unlike for one in measured):
        sentences.append(
            f"No run is like the paper's ({', '.join(unlike)}), so levels are not comparable and no difference from a "
            "published number is shown. Only directions can be compared."
        )
    elif unlike:
        sentences.append(
            f"Some runs are not like the paper's ({', '.join(unlike)}). For these no difference from the published "
            "number is shown, and only directions can be compared."
        )
    if sheet.study.measure == "linear" and measured:
        sentences += [*_published_code(sheet), *_batch_norm(sheet)]
    if sheet.study.measure == "knn_best" and measured:
        fewest = min(one.num_checkpoints for one in measured)
        here = f"the best of {fewest} checkpoints or more" if fewest > 1 else "for some runs the only checkpoint"
        sentences.append(f"The paper's number is the best of all epochs, chosen on the test set; here it is {here}.")
    counts = {
        direction: sum(one.direction == direction for one in sheet.compared)
        for direction in ("same", "opposite", "not told from chance", "not measured")
    }
    directions = ", ".join(f"{count} {direction}" for direction, count in counts.items() if count)
    sentences.append(f"The paper shows {len(sheet.compared)} differences; their direction here: {directions}.")
    if sheet.study.rows == PAIRS:
        sentences.append(_beside_concentration(sheet))
    if sheet.left_out:
        names = ", ".join(dict.fromkeys(run.config.name for run in sheet.left_out))
        sentences.append(f"The table has no cell for {names}.")
    return sentences


def _published_code(sheet: Sheet) -> list[str]:
    """Return a sentence on what measured runs do otherwise than the published code; docs/quirks.md has the settings."""
    configs = [run.config for one in sheet.cells.values() if one.score is not None for run in one.runs]
    learned = [identity_settings(config) for config in configs if config.views.is_learned]
    differences = {
        "clamp the views": any(settings.get("views.clamp") for settings in learned),
        "train both players in one pass": any(
            settings.get("adversary.update") == "simultaneous" for settings in learned
        ),
    }
    told = " and ".join(text for text, is_so in differences.items() if is_so)
    return [f"Unlike the published code, the runs with a viewmaker {told} (docs/quirks.md)."] if told else []


def _batch_norm(sheet: Sheet) -> list[str]:
    """Return sentences on the mode of batch norm, which changes the level of a probe."""
    published = "The published levels were measured with batch norm in train mode while the probe was fitted"
    if sheet.protocol.batch_norm == "train":
        return [f"{published}; so are these."]
    measured = [one for one in sheet.cells.values() if one.score is not None]
    paths = _directories([run.path for one in measured if one.in_train_mode is None for run in one.runs])
    protocol = describe_protocol(sheet.protocol)
    sentences = [f"{published}; the first number of a cell is from {protocol}, and the line below it from train mode."]
    if len(paths) and all(one.in_train_mode is None for one in measured):
        sentences = [
            f"{published}; here it was in eval mode ({protocol}), which changes the level, in docs/claims.md by 1 to 8 "
            "points."
        ]
    if paths:
        sentences.append(f"To measure as published: python -m trainer.probe {' '.join(paths)} --batch-norm train")
    return sentences


def _directories(paths: Sequence[Path]) -> list[str]:
    """Return the arguments that stand for some runs: for several runs of a study, its directory."""
    together = Counter(path.parent for path in set(paths))
    return sorted({str(path.parent if together[path.parent] > 1 else path) for path in paths})


def _beside_concentration(sheet: Sheet) -> str:
    """Compare the errors of pairs of transforms with 1 - sigma, from the analysis of any run on their data."""
    cells = [sheet.cells[pair, 0] for pair in PAIRS]
    runs = [run for cell in cells for run in cell.runs]
    errors = [100 * (1 - cell.score.mean) for cell in cells if cell.score is not None]
    if len(errors) < len(cells):
        return "The errors can be compared with 1 − σ when every pair is measured."
    paths = [RunDir(run.path).analysis / "concentration.json" for run in runs]
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        return f"To compare the errors with 1 − σ: python -m trainer.analyze concentration {runs[0].path}"
    mend = "remove it, or run `python -m trainer.analyze concentration` again"
    found = ConcentrationResult.parse(read_object(path, mend=mend), where=str(path))
    if found.test_manifest_sha256 != runs[0].data_key[1]:
        return f"{path} was made from other test data, so the errors are not compared with its 1 − σ."
    told = []
    for number, delta in enumerate(found.config.deltas):
        shares = [found.pairs[pair][number].clique for pair in PAIRS]
        if len(set(shares)) == 1:
            told.append(f"none at δ = {delta:g}, because all pairs have the same value")
            continue
        correlation, p = spearmanr(errors, shares)
        chance = "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
        told.append(f"{correlation:.2f}".replace("-", "−") + f" at δ = {delta:g} ({chance})")
    return f"Rank correlation of error and 1 − σ over the {len(cells)} pairs, after {path}: {', '.join(told)}."


def missing_commands(sheet: Sheet) -> list[str]:
    """Return the commands that measure the empty cells."""
    commands = [sheet.study.command()] if any(not one.runs for one in sheet.cells.values()) else []
    unprobed = {str(run.path) for one in sheet.cells.values() if one.score is None for run in one.runs}
    return commands + [f"python -m trainer.probe {path}" for path in sorted(unprobed)]
