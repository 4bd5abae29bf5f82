"""The filed results of the suppression study: they are of the runs that it trains, and each of them is probed."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from configs.resolve import resolve_study
from launch.planned_run import default_run_dir
from trainer.config import read_run_config
from trainer.probes.result import labels_in
from trainer.run_dir import RunDir, runs_of

FILED = Path(__file__).parents[2] / "benchmarks/results/suppression_small.tar.xz"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunDir]:
    home = tmp_path_factory.mktemp("runs")
    with tarfile.open(FILED) as tar:
        tar.extractall(home, filter="data")
    return [RunDir(path) for path in runs_of([home / "suppression_small"])]


def test_filed_results_are_of_the_runs_that_the_study_trains(runs: list[RunDir]) -> None:
    study = {default_run_dir(config).name: config for config in resolve_study("studies:suppression_small")}
    for run in runs:
        assert read_run_config(run) == study[run.path.name], run.path.name


def test_every_filed_run_is_finished_and_probed_for_every_label(runs: list[RunDir]) -> None:
    assert runs
    for run in runs:
        wanted = read_run_config(run).probe.labels
        assert wanted is not None
        assert set(wanted) <= set(labels_in(run.probes(run.read_provenance()["finished_step"]))), run.path.name


def test_every_filed_setting_has_its_floors(runs: list[RunDir]) -> None:
    floors: dict[tuple[str, str, int], set[str]] = {}
    for run in runs:
        config = read_run_config(run)
        factors = config.tracking.factors
        found = floors.setdefault((factors["setting"], factors["difficulty"], config.seed), set())
        found |= {path.stem for path in run.probes(0).glob("*.json")}
    assert all({"base", "base-reads_pixels"} <= found for found in floors.values()), floors
