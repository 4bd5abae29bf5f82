"""Runs in the cells of the published tables, and the page of a study."""

from __future__ import annotations

import functools
import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from PIL import Image

from configs.resolve import resolve_study
from data_pipeline.core.errors import UserError
from tests.trainer.reports.made_runs import PROVENANCE, make_run, probe_result, report
from trainer.config import RunConfig, read_run_config
from trainer.reports.charts import rank_scatter
from trainer.reports.studies import read_published, study
from trainer.run_dir import RunDir, write_json


@functools.cache
def configs_of(name: str) -> Mapping[str, RunConfig]:
    """Return the configs of a study by the names of their runs."""
    return {config.name: config for config in reversed(resolve_study(f"studies:{name}"))}


def study_run(directory: Path, name: str, run: str, *, seed: int = 0, num_train: int = 50_000, **numbers: Any) -> Path:
    """Make a run of a study in its own directory, with chosen accuracies."""
    config = configs_of(name)[run]
    data = {"train_manifest_sha256": hashlib.sha256(str(config.data.train_dir).encode()).hexdigest()}
    provenance = numbers.pop("provenance", PROVENANCE) | data
    path = directory / f"{run}-seed{seed}"
    make_run(path, recipe=lambda: config, seed=seed, provenance=provenance, **numbers)
    for result in path.rglob("probes/*/*.json"):
        write_json(result, json.loads(result.read_text()) | {"num_train": num_train} | data)
    return path


def page_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return report(monkeypatch, tmp_path / "page.md", "--study", name, tmp_path / "runs")


def row(page: str, title: str) -> list[str]:
    """Return the cells of the first row of a table that begins with `title`."""
    line = next(line for line in page.splitlines() if line.startswith(f"| {title}"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_a_cell_has_ours_the_papers_and_their_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, accuracy in ((0, 0.58), (2, 0.60)):
        trained = {"base": [accuracy], "overlay": [0.8]}
        study_run(tmp_path / "runs", "table1", "simclr-cifar10_digits", seed=seed, trained=trained)
    page = page_of("table1", tmp_path, monkeypatch)
    cells = row(page, "C+Digits")
    assert cells[0].startswith("59.0 ± ")
    assert cells[0].endswith(" (58.8; +0.2)")
    assert cells[1] == "– (69.3)"
    assert cells[2].startswith("80.0 ± ")
    assert cells[2].endswith(" (86.7; −6.7)")
    assert row(page, "C+Shapes") == ["– (76)", "– (79.8)", "– (100)", "– (100)"]
    assert f"trainer.report --study table1 {tmp_path / 'runs'}" in page
    assert "seeds 0, 2, commits 0123456789ab, on A Processor" in page


@pytest.mark.parametrize(
    "change", [{"num_train": 5000}, {"num_epochs": 7}, {"provenance": {"num_train_samples": 50_000}}, {"small": True}]
)
def test_the_level_of_a_run_unlike_the_papers_is_not_compared(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_small = change.pop("small", False)
    name, run = ("table1_small", "simclr-cifar10-small") if is_small else ("table1", "simclr-cifar10")
    study_run(tmp_path / "runs", name, run, trained={"base": [0.58]}, **change)
    cell = row(page_of(name, tmp_path, monkeypatch), "CIFAR-10 |")[0]
    assert cell.startswith("58.0 ± ")
    assert cell.endswith(" (86.2)")


def test_directions_are_paired_and_told_from_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = {"simclr-cifar10_digits": 0.5, "viewmaker-cifar10_digits": 0.6, "viewmaker-cifar10_shapes": 0.6}
    accuracies |= {"simclr-cifar10_shapes": 0.601, "simclr-cifar10_letters": 0.5, "viewmaker-cifar10_letters": 0.6}
    for seed in (0, 1, 2):
        for run, accuracy in accuracies.items():
            trained = {"base": [accuracy + 0.01 * seed]}
            study_run(tmp_path / "runs", "table1", run, seed=seed, trained=trained, num_test=2000)
    page = page_of("table1", tmp_path, monkeypatch)

    def direction(data: str) -> list[str]:
        return row(page, f"viewmaker-cifar10\\_{data} − simclr-cifar10\\_{data}, base")

    assert direction("digits")[0] == "+10.5"
    assert direction("digits")[1].startswith("10.0 ± ")
    assert direction("digits")[2] == "same"
    assert direction("shapes")[2] == "not told from chance"
    assert direction("letters")[2] == "opposite"
    assert row(page, "simclr-cifar10\\_digits − simclr-cifar10, base")[2] == "not measured"


def test_knn_tables_take_the_best_checkpoint_as_the_paper_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(study_run(tmp_path / "runs", "richness", "moco-cifar10-abc", trained={"base": [0.80]}))
    better = probe_result("base", 5, [0.90], 1000, config=read_run_config(run).probe)
    better |= {"num_train": 50_000, "train_manifest_sha256": run.read_provenance()["train_manifest_sha256"]}
    write_json(run.probes(5) / "base.json", better)
    run.metrics.write_text('{"step": 3, "probe/base/knn": 0.99}\n')  # on some samples
    cell = row(page_of("richness", tmp_path, monkeypatch), "abc |")[2]
    assert cell.startswith("89.0 ± ")


def test_errors_of_one_method_and_dataset_are_drawn_over_the_concentration_of_the_same_transforms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_others = {"moco-cifar100-a": (0.4,), "barlow_twins-cifar10-a": (0.3,)}
    of_moco = {"moco-cifar10-a": (0.61, 0.63), "moco-cifar10-ab": (0.81,), "moco-cifar10-abc": (0.71,)}
    for run, accuracies in (of_moco | of_others).items():
        for seed, accuracy in enumerate(accuracies):
            study_run(tmp_path / "runs", "richness", run, seed=seed, trained={"base": [accuracy]})
    assert "concentration" not in page_of("richness", tmp_path, monkeypatch)

    def of_letters(*outside: float) -> list[dict[str, float]]:
        return [{"delta": 9 + number, "outside": one, "outside_worst": 1.0} for number, one in enumerate(outside)]

    sets = {"a": of_letters(0.7, 0.5), "ab": of_letters(0.3, 0.6), "abc": of_letters(0.6, 0.4), "e": of_letters(0, 0)}
    analysis = RunDir(tmp_path / "runs/moco-cifar10-ab-seed0").analysis
    write_json(analysis / "concentration.json", {"sets": sets})
    (analysis / "concentration.png").write_bytes((analysis / "views.png").read_bytes())
    drawn: dict[str, dict[str, tuple[float, float]]] = {}

    def draw(panels: Mapping[str, Mapping[str, tuple[float, float]]], **labels: str) -> bytes:
        for title, points in panels.items():
            drawn[title] = {name: (x, round(y, 6)) for name, (x, y) in points.items()}
        return b"a"

    monkeypatch.setattr("trainer.reports.studies.rank_scatter", draw)
    page = page_of("richness", tmp_path, monkeypatch)
    assert "(page/concentration.png)" in page
    assert (tmp_path / "page/concentration.png").read_bytes() == b"a"
    assert drawn == {
        "delta 9": {"a": (0.7, 39), "ab": (0.3, 20), "abc": (0.6, 30)},
        "delta 10": {"a": (0.5, 39), "ab": (0.6, 20), "abc": (0.4, 30)},
    }


def test_a_panel_names_its_rank_correlation(monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []
    monkeypatch.setattr(Axes, "set_title", lambda axes, title, **style: titles.append(title))
    png = rank_scatter({"one": {"a": (0, 1), "b": (1, 3), "c": (2, 2)}}, x_label="x", y_label="y")
    assert titles == ["one: rank correlation 0.50, p 0.67"]
    assert Image.open(io.BytesIO(png)).size[0] > 200


def test_two_configurations_never_fill_one_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study_run(tmp_path / "runs", "table1", "simclr-cifar10", trained={"base": [0.5]})
    study_run(tmp_path / "runs", "table1", "simclr-cifar10", seed=1, trained={"base": [0.5]}, num_epochs=3)
    with pytest.raises(UserError, match="simclr-cifar10"):
        page_of("table1", tmp_path, monkeypatch)


def test_the_tables_have_the_published_numbers() -> None:
    cells = {
        (line["study"], line["run"], line["label"]): (line["mean"], line["deviation"])
        for line in read_published("cells")
    }
    assert cells["table1", "simclr-cifar10_digits", "base"] == ("58.8", "")
    assert cells["table1", "viewmaker-cifar10_letters", "overlay"] == ("96.9", "")
    assert cells["table2", "audio-spectral-noise", "overlay"] == ("32.64", "")
    assert cells["table3", "viewmaker-cifar10_letters-masked", "base"] == ("23.2", "")
    assert cells["richness", "moco-cifar10-abcde", "base"] == ("90.12", "0.12")
    assert cells["temperatures", "split-t0.2-800epochs", "base"] == ("90.3", "")
    assert {mean for (name, _, _), (mean, _) in cells.items() if name == "pairs"} == {""}
    assert len(study("pairs").cells) == 10
