"""The filed results of the suppression study: they are of the runs that it trains, each of them is probed, and the page
of the docs is made from them.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from configs.resolve import resolve_study
from data_pipeline.storage.files import unpack_tar
from launch.planned_run import default_run_dir
from tests.trainer.reports.test_report_suppression import report
from trainer.config import RunConfig, read_run_config
from trainer.probes.result import labels_in
from trainer.run_dir import RunDir, runs_of

ROOT = Path(__file__).parents[2]
FILED = ROOT / "benchmarks/results/suppression_small.tar.xz"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunDir]:
    home = tmp_path_factory.mktemp("runs")
    with tarfile.open(FILED) as tar:
        unpack_tar(tar, home)
    return [RunDir(path) for path in runs_of([home / "suppression_small"])]


@pytest.fixture(scope="module")
def configs(runs: list[RunDir]) -> list[RunConfig]:
    return [read_run_config(run) for run in runs]


@pytest.mark.slow
def test_filed_results_are_of_the_runs_that_the_study_trains(runs: list[RunDir], configs: list[RunConfig]) -> None:
    study = {default_run_dir(config).name: config for config in resolve_study("studies:suppression_small")}
    for run, config in zip(runs, configs, strict=True):
        # These runs are older than compile=auto, which does nothing on the CPUs that trained them.
        assert config == study[run.path.name].model_copy(update={"compile": False}), run.path.name


def test_every_filed_run_is_finished_and_probed_for_every_label(runs: list[RunDir], configs: list[RunConfig]) -> None:
    assert runs
    for run, config in zip(runs, configs, strict=True):
        wanted = config.probe.labels
        assert wanted is not None
        assert set(wanted) <= set(labels_in(run.probes(run.read_provenance()["finished_step"]))), run.path.name


def test_every_filed_setting_has_its_floors(runs: list[RunDir], configs: list[RunConfig]) -> None:
    floors: dict[tuple[str, str, int], set[str]] = {}
    for run, config in zip(runs, configs, strict=True):
        factors = config.tracking.factors
        found = floors.setdefault((factors["setting"], factors["difficulty"], config.seed), set())
        found |= {path.stem for path in run.probes(0).glob("*.json")}
    assert all({"base", "base-reads_pixels"} <= found for found in floors.values()), floors


@pytest.mark.slow
def test_the_page_of_the_docs_is_made_from_the_filed_results(
    runs: list[RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made again with the command that the page ends with, it has the same text."""
    (tmp_path / "runs").symlink_to(runs[0].path.parents[1])
    monkeypatch.chdir(tmp_path)
    report("--study", "suppression_small", "runs/suppression_small", "--out", "page/suppression.md")
    assert (tmp_path / "page/suppression.md").read_text() == (ROOT / "docs/suppression.md").read_text()
