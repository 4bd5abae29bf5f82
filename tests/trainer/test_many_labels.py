"""Three labels from a table to a report, with planted truths: one is another, and one is a coin."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from configs import resolve_recipe
from data_pipeline.building.build import build_dataset
from data_pipeline.core.errors import UserError
from tests.commands import Call
from tests.trainer.test_tars import settings
from trainer import probe, report
from trainer.preflight import check_data
from trainer.probes.result import ProbeResult, read_result, results_in
from trainer.run_dir import RunDir, steps_in
from trainer.train import train

CPU = torch.device("cpu")
NUM_TRAIN, NUM_TEST = 240, 160


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures whose `shade` is plain to see; `twin` equals it, `coin` is thrown, and `rare` is missing in most."""
    root = tmp_path_factory.mktemp("scans")
    (root / "pics").mkdir()
    rng = np.random.default_rng(0)
    rows = []
    for number in range(NUM_TRAIN + NUM_TEST):
        shade = int(rng.integers(2))
        pixels = rng.integers(0, 100, (16, 16, 3)) + 120 * shade
        Image.fromarray(pixels.astype(np.uint8)).save(root / "pics" / f"{number}.png")
        rare = ["low", "high"][shade] if number % 4 == 0 else ""
        split = "train" if number < NUM_TRAIN else "test"
        rows.append([f"{number}.png", split, ["dark", "light"][shade], f"t{shade}", "ht"[int(rng.integers(2))], rare])
    with (root / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["file", "split", "shade", "twin", "coin", "rare"], *rows])
    for split in ("train", "test"):
        table = {"labels": str(root / "labels.csv")}
        build_dataset("folder", root / split, root=root / "pics", source_options=table, split=split)
    return root


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run_dir = RunDir(tmp_path_factory.mktemp("runs") / "run")
    more = ["num_epochs=1", "data.overlay=baked", "probe.online_every_steps=5"]
    train(resolve_recipe("debug:image", settings(data, *more)), run_dir, device=CPU, command="train")
    return run_dir


def results(run_dir: RunDir) -> dict[str, ProbeResult]:
    directory = run_dir.probes(max(steps_in(run_dir.all_probes)))
    found: dict[str, ProbeResult] = {}
    for result in results_in(directory):
        found.setdefault(result.label, result)
    return found


@pytest.mark.slow
def test_three_labels_are_trained_probed_and_reported(run: RunDir, tmp_path: Path, call: Call) -> None:
    probed = call(probe.main, run.path, "--set", "num_epochs=5", "--set", "views=none")
    assert probed.status == 0, probed.stderr
    for label in ("shade", "twin", "coin", "rare"):
        assert f"label_{label}" in probed.stdout
    directory = run.probes(max(steps_in(run.all_probes)))
    found = {path.name.split("-")[0]: read_result(path) for path in directory.glob("*-*.json")}
    assert set(found) == {"shade", "twin", "coin", "rare"}
    # A label that equals another is read as well as that, to the bit; a coin is read at chance.
    assert found["twin"].linear == found["shade"].linear
    assert found["twin"].knn == found["shade"].knn
    assert found["shade"].linear.accuracy > 0.95
    assert abs(found["coin"].linear.accuracy - 0.5) < 4 * (0.25 / NUM_TEST) ** 0.5
    assert abs(found["coin"].knn.accuracy - 0.5) < 4 * (0.25 / NUM_TEST) ** 0.5
    # Of the rare label, the samples that have it count, and the others are told.
    rare = found["rare"]
    assert (rare.num_train, rare.num_test, rare.num_unlabelled) == (60, 40, 120)
    assert rare.linear.accuracy > 0.9
    # Groups: shade and twin never disagree, so two groups are empty; coin splits each shade.
    groups = {groups.labels: groups for groups in found["shade"].groups}
    assert set(groups) == {("shade", "twin"), ("shade", "coin"), ("shade", "rare")}
    assert [num > 0 for row in groups["shade", "twin"].num_test for num in row] == [True, False, False, True]
    assert groups["shade", "rare"].num_unlabelled == 120
    assert sum(map(sum, groups["shade", "coin"].num_test)) == NUM_TEST
    right = sum(map(sum, groups["shade", "coin"].right["linear"]))
    assert right / NUM_TEST == pytest.approx(found["shade"].linear.accuracy)
    assert "worst group of shade x twin: linear" in probed.stdout

    page = tmp_path / "report.html"
    reported = call(report.main, run.path, "--out", page)
    assert reported.status == 0, reported.stderr
    html = page.read_text()
    for said in ("Worst groups", "coin", "while training"):
        assert said in html
    assert "a photo" not in html  # there is no base label, so nothing is said of it


@pytest.mark.slow
def test_the_labels_and_the_groups_to_probe_can_be_named(data: Path, tmp_path: Path, call: Call) -> None:
    more = ["num_epochs=1", "probe.labels=[coin, shade]", "probe.groups=[[coin, twin]]", "probe.online_every_steps=5"]
    run_dir = RunDir(tmp_path / "run")
    train(resolve_recipe("debug:image", settings(data, *more)), run_dir, device=CPU, command="train")
    logged = {name for line in run_dir.read_metrics() for name in line if name.startswith("probe/")}
    assert logged == {f"probe/{label}/{how}" for label in ("coin", "shade") for how in ("knn", "ridge")} | {
        "probe/seconds"
    }
    assert call(probe.main, run_dir.path).status == 0
    found = results(run_dir)
    assert list(found) == ["coin", "shade"]
    assert [groups.labels for groups in found["coin"].groups] == [("coin", "twin")]
    assert found["shade"].groups == ()
    one = call(probe.main, run_dir.path, "--set", "labels=[twin, rare]")
    assert one.status == 0, one.stderr
    assert list(results(run_dir)) == ["coin", "rare", "shade", "twin"]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "probe.labels=[shadow]",
            "no label_shadow of two or more classes, only label_shade, label_twin",
        ),
        ("probe.groups=[[shade, shadow]]", r'probe\.groups names label_shadow, which .*; did you mean "shade"'),
    ],
)
def test_a_label_that_the_data_lack_is_told_before_training(data: Path, setting: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_data(resolve_recipe("debug:image", settings(data, setting)))


def test_the_label_in_which_two_datasets_differ_is_named(data: Path, tmp_path: Path) -> None:
    table = (data / "labels.csv").read_text().replace(",t1,", ",t2,")
    (tmp_path / "labels.csv").write_text(table)
    from_table = {"labels": str(tmp_path / "labels.csv")}
    build_dataset("folder", tmp_path / "test", root=data / "pics", source_options=from_table, split="test")
    config = resolve_recipe("debug:image", settings(data, f"data.test_dir={tmp_path / 'test'}"))
    with pytest.raises(UserError, match="class 1 of label_twin is t1 in the train set but t2 in the test set"):
        check_data(config)
