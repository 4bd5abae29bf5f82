"""Filed results: of the suppression study, and the numbers that pages of the docs take from them.

The filed accuracies are of the runs that the study trains. docs/suppression.md is made from them.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from configs import studies
from tests.trainer.reports.made_runs import report
from trainer.reports.page import accuracy
from trainer.reports.suppression import Setting, column_of, settings_of
from trainer.reports.table import Measurement, read_csv

ROOT = Path(__file__).parents[2]
FILED = "docs/suppression/accuracies.csv.gz"
# Cures and settings that were not trained yet.
NOT_ON_EVERY_SETTING = re.compile("SIGReg|late pruning|feature sieve|adversarial masks|ceiling: .*, joint")
NOT_FILED = {"Boolean features", "Boolean features, correlated", "Digits in two modalities"}
NOT_IN_THE_STUDY = "near neighbours"  # a cure whose code is gone


@pytest.fixture(scope="module")
def rows() -> list[Measurement]:
    return [row for row in read_csv(ROOT / FILED) if row.readout == "linear"]


@pytest.fixture(scope="module")
def settings(rows: list[Measurement]) -> dict[str, Setting]:
    return {setting.name: setting for setting in settings_of(rows)[0]}


def test_filed_results_are_of_the_runs_that_the_study_trains(rows: list[Measurement]) -> None:
    """A cure is filed on a setting with all difficulties and seeds, or not at all."""
    filed = {(row.encoder, row.seed): row.factors for row in rows if row.factors["cure"] != NOT_IN_THE_STUDY}
    found = {(factors["cure"], factors["setting"]) for factors in filed.values()}
    study = []
    for run in studies.suppression_small():
        factors = run.tracking.factors
        is_due = factors["setting"] not in NOT_FILED and not NOT_ON_EVERY_SETTING.fullmatch(factors["cure"])
        if is_due or (factors["cure"], factors["setting"]) in found:
            study.append((run.name, run.seed, factors))
    assert len(filed) == len(study)
    for name, seed, factors in study:
        assert filed[name, seed] == {factor: level for factor, level in factors.items() if level}


def test_every_filed_run_is_finished_and_every_setting_has_its_floors(rows: list[Measurement]) -> None:
    assert {row.run for row in rows} == {row.run for row in rows if row.is_final}
    floors: dict[tuple[str, str, int], set[str]] = {}
    for row in rows:
        found = floors.setdefault((row.factors["setting"], row.factors["difficulty"], row.seed), set())
        if row.step == 0 and row.label == "base":
            found.add(row.reads)
    assert all(found == {"features", "pixels"} for found in floors.values())


@pytest.mark.slow
def test_the_page_of_the_docs_is_made_from_the_filed_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made again with the command that the page ends with, it has the same text and pictures."""
    monkeypatch.chdir(ROOT)
    page = report(monkeypatch, tmp_path / "suppression.md", "--study", "suppression_small", FILED)
    assert page == (ROOT / "docs/suppression.md").read_text()


@pytest.mark.parametrize(
    ("setting", "label", "cure", "number", "is_best", "is_floor"),
    [
        ("RandBit", "base", "channel dropout", "74.8 ± 8.6", True, False),
        ("RandBit", "base", "BYOL", "10.5 ± 1.2", False, True),
        ("C+Digits", "base", "viewmaker, rate 0.25", "21.6 ± 7.2", False, True),
        ("Coloured digits", "overlay", "viewmaker", "68.8 ± 35.2", True, False),
    ],
)
def test_numbers_intervals_and_what_is_told_are_those_that_were_published_first(
    setting: str, label: str, cure: str, number: str, is_best: bool, is_floor: bool, settings: dict[str, Setting]
) -> None:
    found = settings[setting]
    column = column_of(found, found.middle, label)
    assert accuracy(column.of_cure[cure]) == number
    assert (column.is_best(cure), cure in column.floor) == (is_best, is_floor)


@pytest.mark.parametrize(("row", "cure"), [("none", "SimCLR"), ("channel dropout", "channel dropout")])
def test_the_table_of_channel_dropout_has_the_filed_accuracies(rows: list[Measurement], row: str, cure: str) -> None:
    page = (ROOT / "docs/cures.md").read_text()
    (cells,) = re.findall(rf"^\| {row} \| 160 \| ([\d., ]+) \| ([\d., ]+) \|", page, flags=re.MULTILINE)
    wanted = {"setting": "RandBit", "difficulty": "10", "cure": cure}
    found = {(one.label, one.seed): one.value for one in rows if one.is_final and wanted.items() <= one.factors.items()}
    for text, label in zip(cells, ("base", "overlay"), strict=True):
        for seed, number in enumerate(text.split(", ")):
            assert float(number) == pytest.approx(100 * found[label, seed], abs=0.0501), (label, seed)


def test_the_table_of_rivals_has_the_means_of_their_record(rows: list[Measurement]) -> None:
    filed = [row for row in read_csv(ROOT / "docs/suppression/rivals.csv.gz") if row.readout == "linear"]
    simclr = [row for row in rows if (row.factors["setting"], row.factors["cure"]) == ("C+Digits", "SimCLR")]
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in [*filed, *simclr]:
        if row.is_final:
            found.setdefault((row.factors["setting"], row.factors["cure"], row.label), {})[row.seed] = row.value
    assert all(values.keys() == {0, 1, 2} for values in found.values())
    mean = {cell: f"{100 * sum(values.values()) / 3:.1f}" for cell, values in found.items()}
    rivals = (ROOT / "docs/cures.md").read_text().partition("### Rivals")[2].partition("\n### ")[0]
    lines = re.findall(r"^\| (.*) \| (.*) \| (.*) \| (.*) \| (.*) \|$", rivals, flags=re.MULTILINE)[1:]
    assert {cure for cure, *_ in lines} == {"SIGReg", "late pruning", "adversarial masks", "feature sieve", "SimCLR"}
    places = [("C+Digits", "overlay"), ("C+Digits", "base"), ("RandBit", "base"), ("RandBit", "overlay")]
    for cure, *numbers in lines:
        assert numbers == [mean.get((setting, cure, label), "–") for setting, label in places]
    beside = (mean["RandBit", cure, "base"] for cure in ("viewmaker", "channel dropout", "ceiling: base, joint"))
    text = "the digit in {} %, channel dropout in {} %, the joint ceiling in {} %".format(*beside)
    assert text in " ".join(rivals.split())


def test_what_is_said_of_further_settings_is_in_their_record() -> None:
    found = {
        (row.factors["setting"], row.factors["cure"], row.factors["difficulty"], row.label): f"{100 * row.value:.1f}"
        for row in read_csv(ROOT / "docs/suppression/further_settings.csv.gz")
        if row.readout == "linear"
    }
    page = " ".join((ROOT / "docs/cures.md").read_text().split())
    boolean, correlated, two = "Boolean features", "Boolean features, correlated", "Digits in two modalities"
    bits = [found[boolean, "SimCLR", *each] for each in (("2", "overlay"), ("2", "core"), ("3", "core"))]
    text = (
        "SimCLR reads the easier bit at {} %, and the core feature at {} % if it is the parity of two bits of eight, "
        "but at {} % of three; the same network, told the latter, reads it at {} %."
    )
    assert text.format(*bits, found[boolean, "ceiling: core", "3", "core"]) in page
    cures, labels = ("SimCLR", "viewmaker"), ("core", "overlay")
    (learned,) = {found[correlated, cure, "0.75", label] for cure in cures for label in labels}
    assert f"SimCLR and the viewmaker read both at {learned} %" in page
    dropout = found[correlated, "channel dropout", "0.75", "core"]
    assert f"channel dropout, which takes bits away, reads the core feature at {dropout} %" in page
    most = max(float(value) for (setting, *_, label), value in found.items() if (setting, label) == (two, "overlay"))
    untold = [cure for setting, cure, *_ in found if setting == two and not cure.startswith("ceiling")]
    photos = sorted(float(found[two, cure, "2", "base"]) for cure in untold)
    assert f"no encoder learns the number (at most {most} %; chance is 10)" in page
    told = found[two, "ceiling: base", "2", "base"]
    assert f"the photo is read at {photos[0]} to {photos[-1]} %, told at {told} %" in page


def test_the_page_trained_again_lies_in_its_prediction_intervals(rows: list[Measurement]) -> None:
    def place(row: Measurement) -> tuple[str, ...]:
        return (*(row.factors[name] for name in ("setting", "difficulty", "cure")), row.label)

    before: dict[tuple[str, ...], dict[int, float]] = {}
    for row in rows:
        if row.is_final:
            before.setdefault(place(row), {})[row.seed] = row.value
    again, away = read_csv(ROOT / "docs/suppression/again.csv.gz"), []
    for row in again:
        filed = before[place(row)]
        mean = np.mean(list(filed.values()))
        of_seeds = (
            stats.t.ppf(0.975, len(filed) - 1) * np.std(list(filed.values()), ddof=1) * (1 + 1 / len(filed)) ** 0.5
        )
        of_samples = 1.96 * (2 * mean * (1 - mean) / 2_000) ** 0.5
        assert abs(row.value - mean) <= max(of_seeds, of_samples), place(row)
        away.append(100 * abs(row.value - filed[row.seed]))
    page = " ".join((ROOT / "docs/cures.md").read_text().split())
    assert f"{len({row.run for row in again})} runs of nine settings" in page
    assert f"All {len(again)} accuracies lie in the 95 % prediction interval of the page's seeds" in page
    assert f"half of them within {np.median(away):.1f} points of the same seed" in page
    assert len({row.factors["setting"] for row in again}) == 9


def test_the_table_of_both_features_has_the_filed_runs() -> None:
    found: dict[tuple[str, ...], list[float]] = {}
    with gzip.open(ROOT / "docs/suppression/both_features.csv.gz", "rt") as file:
        for run in csv.DictReader(file):  # in the order of the seeds
            if int(run["seed"]) in {3, 4, 5}:
                point = tuple(run[name] for name in ("setting", "difficulty", "encoder", "steps", "label"))
                found.setdefault(point, []).append(float(run["accuracy"]))
    settings = {
        "RandBit, 5 bits": ("randbit", "5"),
        "RandBit, 10 bits": ("randbit", "10"),
        "Coloured digits, uncorrelated": ("colours", "0.0"),
    }
    table = (ROOT / "docs/cures.md").read_text().partition("### Both features")[2].partition("*Four draws*")[0]
    lines = [
        line.strip("| ").split(" | ")
        for line in table.splitlines()
        if line.startswith(tuple("| " + name for name in settings))
    ]
    assert len(lines) == 5
    for title, encoder, steps, digit, ceiling, kept, easy, kept_easy in lines:
        for label, shown, reference, share in (
            ("base", digit, float(ceiling), kept),
            ("overlay", easy, 100.0, kept_easy),
        ):
            accuracies = found[*settings[title], encoder, steps, label]
            chance = 50 if label == "overlay" and "bits" in title else 10
            assert [float(number) for number in shown.split(", ")] == pytest.approx(accuracies, abs=0.0501)
            mean = sum(accuracies) / len(accuracies)
            assert float(share.removesuffix(" %")) == pytest.approx(
                100 * (mean - chance) / (reference - chance), abs=0.0501
            )


def test_the_shares_of_the_page_on_the_dropout_rate_are_those_of_its_records() -> None:
    names = ("dropout_rate_cpu.json", "dropout_rate_budget_0.2_cpu.json")
    results = [one for name in names for one in json.loads((ROOT / "benchmarks/results" / name).read_text())["results"]]
    kept = {True: [], False: []}  # type: dict[bool, list[str]]
    for one in results:
        share = one["base_kept_where_overlay_destroyed"]
        if share is not None and one["setting"]["trained"] != "not at all":
            kept[one["setting"]["budget"] >= 0.2].append(f"{100 * share:.0f}")
    page = " ".join((ROOT / "docs/dropout_rate.md").read_text().split())
    lowest, highest = (of(map(int, kept[True])) for of in (min, max))
    assert f"{lowest} to {highest} % kept the kind" in page
    small, larger = kept[False]
    assert f"{small} % kept the kind at budget 0.05, and {larger} % at 0.1" in page
