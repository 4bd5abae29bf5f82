"""Runs laid into the cells of a published table, and what that tells.

Accuracies are in per cent here, as in the tables. What may never happen: a difference of levels between a run and a
paper that did not train on as much, and a cell filled by two different configurations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from scipy.stats import spearmanr

from data_pipeline.errors import UserError
from trainer.analysis.concentration import ConcentrationResult
from trainer.config import difference
from trainer.probes.features import LabelSpace
from trainer.reporting.findings import Score, resolution
from trainer.reporting.published import PAIRS, Cell, Contrast, Study
from trainer.reporting.runs import Run
from trainer.rundir import RunDir

Direction = Literal["same", "opposite", "not told from chance", "not measured"]


@dataclass(frozen=True)
class Filled:
    """A cell and what was measured for it: `score` over `runs`, one a seed, or why there is none.

    `unlike` says in what the runs are not like the paper's; empty where nothing hinders a comparison of levels.
    `num_checkpoints` is over how many the best was taken.
    """

    cell: Cell
    runs: tuple[Run, ...]
    score: Score | None
    unlike: tuple[str, ...]
    num_checkpoints: int = 1

    @property
    def missing(self) -> str:
        if not self.runs:
            return "not measured: no run"
        return "" if self.score else "not measured: no probe"

    @property
    def difference(self) -> float | None:
        """Ours less the published one, in points; None where there is none, or where only directions compare."""
        if self.score is None or self.cell.published is None or self.unlike:
            return None
        return 100 * self.score.mean - self.cell.published.mean


@dataclass(frozen=True)
class Compared:
    """A published difference beside ours, in points, which is resolved from `resolution` on."""

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
    """The whole table. `left_out` are runs that it has no cell for."""

    study: Study
    cells: Mapping[tuple[str, int], Filled]
    compared: tuple[Compared, ...]
    left_out: tuple[Run, ...]


def fill(study: Study, runs: Sequence[Run]) -> Sheet:
    """The runs in the cells of `study`, by their names. Raises `UserError` where a cell could be filled in two ways."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.config.name, []).append(run)
    for name, namesakes in by_name.items():
        if any(cell.run == name for cell in study.cells.values()):
            _check_namesakes(namesakes)
    cells = {
        place: _fill(study, cell, study.columns[place[1]].label, by_name.get(cell.run, []))
        for place, cell in study.cells.items()
    }
    names = {cell.run for cell in study.cells.values()}
    return Sheet(
        study=study,
        cells=cells,
        compared=tuple(_compare(study, contrast, cells) for contrast in study.contrasts),
        left_out=tuple(run for run in runs if run.config.name not in names),
    )


def _check_namesakes(runs: Sequence[Run]) -> None:
    first = runs[0]
    for run in runs[1:]:
        differing = [
            key
            for key in difference(first.config, run.config)
            if key != "seed"
            and not key.startswith(("tracking.", "data.train_dir", "data.test_dir", "data.num_workers"))
        ]
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


def _fill(study: Study, cell: Cell, label: LabelSpace, runs: Sequence[Run]) -> Filled:
    measured = [found for run in runs if (found := _accuracy(study, run, label)) is not None]
    if not measured:
        return Filled(cell, tuple(runs), None, ())
    unlike = list(dict.fromkeys(text for run in runs for text in _unlike(study, cell, label, run)))
    score = Score(tuple(found.accuracy for found in measured), min(found.num_test for found in measured))
    return Filled(cell, tuple(runs), score, tuple(unlike), min(found.num_checkpoints for found in measured))


@dataclass(frozen=True)
class _Accuracy:
    accuracy: float
    num_test: int
    num_checkpoints: int


def _accuracy(study: Study, run: Run, label: LabelSpace) -> _Accuracy | None:
    """As the paper measures: the linear probe after the last epoch, or the best kNN vote of all checkpoints."""
    if study.measure == "linear":
        probe = run.final_probe(label)
        return None if probe is None else _Accuracy(probe.linear.accuracy, probe.num_test, 1)
    probes = [by_label[label] for step, by_label in run.probes.items() if step > 0 and label in by_label]
    votes = {probe.checkpoint_step: probe.knn.accuracy for probe in probes}
    num_test = min((probe.num_test for probe in probes), default=run.config.probe.online_num_test)
    needed = max((probe.num_train for probe in probes), default=study.num_train)
    if run.config.probe.online_num_train >= needed and run.config.probe.online_num_test >= num_test:
        key = f"probe/{label}/knn"
        votes |= {entry["step"]: entry[key] for entry in run.metrics if isinstance(entry.get(key), int | float)}
    return _Accuracy(max(votes.values()), num_test, len(votes)) if votes else None


def _unlike(study: Study, cell: Cell, label: LabelSpace, run: Run) -> list[str]:
    """In what a run is not like the paper's."""
    config, probe = run.config, run.final_probe(label)
    pairs: list[tuple[int | str, int | str, str]] = [
        (config.encoder.kind, study.encoder, ""),
        (config.num_epochs, cell.num_epochs, " epochs"),
        (config.global_batch_size, study.batch_size, " in a batch"),
    ]
    if probe is not None:
        pairs.append((probe.num_train, study.num_train, " train samples"))
        if study.measure == "linear":
            pairs.append((probe.probe_config.num_epochs, 100, " epochs of the probe"))
    return [f"{_number(ours)} instead of {_number(theirs)}{unit}" for ours, theirs, unit in pairs if ours != theirs]


def _number(value: int | str) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _compare(study: Study, contrast: Contrast, cells: Mapping[tuple[str, int], Filled]) -> Compared:
    first, second = cells[contrast.first], cells[contrast.second]
    name = _name(study, contrast)
    if first.score is None or second.score is None:
        return Compared(contrast, name, None, None)
    points = 100 * (first.score.mean - second.score.mean)
    return Compared(contrast, name, points, 100 * resolution(first.score, second.score))


def _name(study: Study, contrast: Contrast) -> str:
    """ "C+Digits, object: viewmaker − expert views", or "CIFAR-10, MoCo: abcde − abcd"."""
    (row, number), (other_row, other_number) = contrast.first, contrast.second
    column, other = study.columns[number], study.columns[other_number]
    if row == other_row:
        return f"{row}, {column.group}: {column.title} − {other.title}"
    return f"{column.group}, {column.title}: {row} − {other_row}"


def summary(sheet: Sheet) -> list[str]:
    """What the sheet tells, and what it cannot, in sentences."""
    filled = list(sheet.cells.values())
    measured = [one for one in filled if one.score is not None]
    sentences = [f"{len(measured)} of the {len(filled)} cells are measured."]
    unlike = list(dict.fromkeys(text for one in measured for text in one.unlike))
    if unlike and all(one.unlike for one in measured):
        sentences.append(
            f"No run is like the paper's ({', '.join(unlike)}), so levels are not comparable and no difference to a "
            "published number is shown; what can be compared are directions."
        )
    elif unlike:
        sentences.append(
            f"Some runs are not like the paper's ({', '.join(unlike)}); where that is so, no difference to the "
            "published number is shown, and only directions can be compared."
        )
    if sheet.study.measure == "knn_best" and measured:
        fewest = min(one.num_checkpoints for one in measured)
        here = (
            f"the best of {fewest} checkpoints or more" if fewest > 1 else "for some runs that of one checkpoint alone"
        )
        sentences.append(f"The paper's number is the best of all epochs, chosen on the test set; here it is {here}.")
    counts = {
        direction: sum(one.direction == direction for one in sheet.compared)
        for direction in ("same", "opposite", "not told from chance", "not measured")
    }
    told = ", ".join(f"{count} {direction}" for direction, count in counts.items() if count)
    sentences.append(f"Of {len(sheet.compared)} differences that the paper shows, the direction here: {told}.")
    if sheet.study.rows == PAIRS:
        sentences.append(_beside_concentration(sheet))
    if sheet.left_out:
        names = ", ".join(dict.fromkeys(run.config.name for run in sheet.left_out))
        sentences.append(f"The table has no cell for {names}.")
    return sentences


def _beside_concentration(sheet: Sheet) -> str:
    """How the errors of pairs of transforms are ordered against 1 - sigma, which any run of their data may hold."""
    cells = [sheet.cells[pair, 0] for pair in PAIRS]
    runs = [run for cell in cells for run in cell.runs]
    errors = [100 * (1 - cell.score.mean) for cell in cells if cell.score is not None]
    if len(errors) < len(cells):
        return "How error and 1 − σ go together shows once every pair is measured."
    paths = [RunDir(run.path).analysis / "concentration.json" for run in runs]
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        return f"To see how error and 1 − σ go together: python -m trainer.analyze concentration {runs[0].path}"
    found = ConcentrationResult.parse(json.loads(path.read_text()), where=str(path))
    if found.test_manifest_sha256 != runs[0].data_key[1]:
        return f"{path} is of other test data than the runs, so errors are not set beside its 1 − σ."
    told = []
    for number, delta in enumerate(found.config.deltas):
        shares = [found.pairs[pair][number].clique for pair in PAIRS]
        if len(set(shares)) == 1:
            told.append(f"none at δ = {delta:g}, where all pairs have the same")
            continue
        correlation, p = spearmanr(errors, shares)
        chance = "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
        told.append(f"{correlation:.2f}".replace("-", "−") + f" at δ = {delta:g} ({chance})")
    return f"Rank correlation of error and 1 − σ over the {len(cells)} pairs, after {path}: {', '.join(told)}."


def missing_commands(sheet: Sheet) -> list[str]:
    """What measures the empty cells."""
    commands = [sheet.study.command()] if any(not one.runs for one in sheet.cells.values()) else []
    unprobed = {str(run.path) for one in sheet.cells.values() if one.score is None for run in one.runs}
    return commands + [f"python -m trainer.probe {path}" for path in sorted(unprobed)]
