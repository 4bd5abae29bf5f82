"""Filed results: of the suppression study, and the numbers that pages of the docs take from them.

The filed runs are those that the study trains, and each of them is probed. docs/suppression.md is made from them.
"""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path

import pytest

from configs.resolve import resolve_study
from data_pipeline.storage.files import unpack_tar
from launch.planned_run import default_run_dir
from tests.trainer.reports.test_report_suppression import report
from trainer.config import RunConfig, read_run_config
from trainer.probes.result import labels_in, read_result
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


@pytest.mark.parametrize(("row", "cure"), [("none", "simclr"), ("channel dropout", "channel-dropout")])
def test_the_table_of_channel_dropout_has_the_filed_accuracies(runs: list[RunDir], row: str, cure: str) -> None:
    page = (ROOT / "docs/cures.md").read_text()
    (cells,) = re.findall(rf"^\| {row} \| 160 \| ([\d., ]+) \| ([\d., ]+) \|", page, flags=re.MULTILINE)
    found = {run.path.name: run.probes(160) for run in runs}
    for text, label in zip(cells, ("base", "overlay"), strict=True):
        for seed, number in enumerate(text.split(", ")):
            result = read_result(found[f"randbit-10-{cure}-seed{seed}"] / f"{label}.json")
            assert float(number) == pytest.approx(100 * result.linear.accuracy, abs=0.0501), (label, seed)


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
