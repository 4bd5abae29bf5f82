"""Labels that are numbers, and data without labels: what is measured, and what every reader of a run says of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from sklearn.neighbors import KNeighborsRegressor

from configs import debug
from data_pipeline.building.build import build_dataset
from data_pipeline.core.errors import UserError
from data_pipeline.storage.manifest import LabelEntry
from tests.trainer.reports.made_runs import Page
from trainer.analyses.analysis import LoadedRun
from trainer.analyze import ANALYSES, load_analysis
from trainer.config import RunConfig
from trainer.probed_runs.probing import ProbeOptions, probe_run
from trainer.probes import ProbeConfig, probe
from trainer.probes.knn import knn_classes
from trainer.probes.linear import Target
from trainer.probes.numbers import PENALTIES, fit_ridge, r2
from trainer.probes.result import read_result, unpack_right
from trainer.report import main as report
from trainer.run_dir import RunDir
from trainer.train import train

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("classes", "counts", "is_number"),
    [
        (("1.5", "2", "-3e2"), (1, 1, 1), True),
        (("1", "2", "3"), (1, 1, 2), False),  # two of four samples, not more than half
        (("1", "2", "3", "4"), (1, 1, 1, 2), True),
        (("1", "2", "3"), (1, 1, 0), True),  # a value of the other split
        (("1", "2", "x"), (1, 1, 1), False),
        (("1_0", "2_0"), (1, 1), False),
        (("1", "2"), (), False),
    ],
)
def test_a_label_is_a_number_if_most_samples_have_a_number_of_their_own(
    classes: tuple[str, ...], counts: tuple[int, ...], is_number: bool
) -> None:
    assert LabelEntry(title="age", classes=classes, counts=counts).is_number == is_number


@pytest.mark.parametrize("num_features", [8, 150])
def test_the_regressions_are_those_of_scikit_learn(num_features: int) -> None:
    """Also with more features than samples."""
    draw = torch.Generator().manual_seed(num_features)
    scale_F = torch.rand(num_features, generator=draw) * 9 + 1
    train_NF, test_MF = (5 + scale_F * torch.randn(num, num_features, generator=draw) for num in (90, 40))
    weight_F = torch.randn(num_features, generator=draw).double() / num_features**0.5
    number_N, number_M = (
        30 + (x.double() / scale_F) @ weight_F + torch.randn(len(x), generator=draw).double()
        for x in (train_NF, test_MF)
    )
    predicted_M, _, penalty = fit_ridge(train_NF, number_N, test_MF)
    assert PENALTIES[0] < penalty < PENALTIES[-1]
    train, test = train_NF.double().numpy(), test_MF.double().numpy()
    mean, std = train.mean(0), train.std(0)
    peer = Ridge(alpha=penalty * 90).fit((train - mean) / std, number_N.numpy())
    np.testing.assert_allclose(predicted_M.numpy(), peer.predict((test - mean) / std), rtol=1e-6)
    assert r2(predicted_M, number_M) == pytest.approx(r2_score(number_M.numpy(), predicted_M.numpy()), rel=1e-12)

    unit, unit_test = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (train, test))
    near = KNeighborsRegressor(20, weights=lambda d: np.exp((1 - d**2 / 2) / 0.1), algorithm="brute")
    rows_N, rows_M = torch.arange(90), torch.zeros(40, dtype=torch.int64)
    target = Target(rows_N, rows_M, 90, numbers=(number_N, number_M[:1]))
    of_neighbors = knn_classes(train_NF, test_MF, target, num_neighbors=20)
    expected = near.fit(unit, number_N.numpy()).predict(unit_test)
    np.testing.assert_allclose(of_neighbors.numpy(), expected, rtol=1e-6)


def build(home: Path, columns: dict[str, Sequence[Sequence[object]]], *, num: int = 48) -> Path:
    """Build train and test sets of grey pictures, each with labels from a table of its own.

    The brightness of a picture is that of its row.
    """
    draw = np.random.default_rng(0)
    for which, split in enumerate(("train", "test")):
        root = home / "pictures" / split
        root.mkdir(parents=True)
        lines = [",".join(["file", "split", *columns])]
        for row in range(num):
            noise = draw.integers(0, 6, (16, 16, 3))
            Image.fromarray((4 * row + which + noise).astype(np.uint8)).save(root / f"{row}.png")
            lines.append(",".join([f"{row}.png", split, *(str(one[which][row]) for one in columns.values())]))
        (home / f"{split}.csv").write_text("\n".join(lines) + "\n")
    for split in ("train", "test"):
        table = {"labels": str(home / f"{split}.csv")} if columns else {}
        root = home / "pictures" / split if columns else home / "pictures"
        given: dict[str, Any] = {"root": root, "source_options": {"image_size": "16"} | table, "split": split}
        build_dataset("folder", home / split, **given)
    return home


def brightness(num: int = 48) -> list[list[str]]:
    """Return ages that rise with the brightness; no test age is a train age."""
    return [[f"{row + shift:.2f}" for row in range(num)] for shift in (0.25, 0.75)]


def run_on(data: Path, directory: Path, **probe_settings: Any) -> RunDir:
    config = debug.image().model_dump()
    config["data"] |= {"train_dir": f"{data}/train", "test_dir": f"{data}/test", "num_workers": 0}
    config["encoder"] |= {"width": 2}
    config["probe"] |= {"num_epochs": 2, "views": "none"} | probe_settings
    config |= {"global_batch_size": 16, "num_epochs": 1, "tracking": config["tracking"] | {"wandb": "disabled"}}
    train(RunConfig.model_validate(config), RunDir(directory), device=CPU, command="test")
    return RunDir(directory)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A probed run on pictures with a number, a class, and a label that only the train set has."""
    home = tmp_path_factory.mktemp("numbers")
    night = [["day" if row > 24 else "night" for row in range(48)] for _ in range(2)]
    site = [["ab"[row % 2] for row in range(48)], [""] * 48]
    data = build(home / "data", {"age": brightness(), "night": night, "site": site})
    run_dir = run_on(data, home / "run", online_every_steps=2)
    probe_run(run_dir, ProbeOptions(untrained=True), device=CPU)
    return run_dir


def test_a_number_gets_r2_beside_the_accuracy_of_classes(numbered: RunDir) -> None:
    age, night = (read_result(numbered.probes(3) / f"{name}.json") for name in ("age", "night"))
    assert not (numbered.probes(3) / "site.json").exists()
    assert age.penalty is not None
    assert night.penalty is None
    assert (age.chance, age.class_names, age.groups) == (0.0, (), ())
    assert all("age" not in groups.labels for groups in night.groups)
    assert age.linear.accuracy > 0.9
    assert age.majority_share == pytest.approx(0.0, abs=0.01)
    scores = unpack_right(age.right_samples["knn"], num_test=48)
    assert scores is not None
    assert scores.astype(float).mean() == pytest.approx(age.knn.accuracy, abs=1e-3)
    data = numbered.path.parent / "data"
    found = probe(lambda x: x.mean((1, 2, 3))[:, None], data / "train", data / "test", config=ProbeConfig(views="none"))
    assert found["age"].linear > 0.99
    assert list(found) == ["age", "night"]


def test_every_reader_of_a_run_takes_a_number(numbered: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("probe/night/knn" in entry for entry in numbered.read_metrics())
    assert not any("probe/age/knn" in entry for entry in numbered.read_metrics())
    for name in ("alignment", "filters", "feature_dropout"):
        analysis = load_analysis(name)
        analysis.analyze([LoadedRun(numbered)], config=analysis.settings())
        assert "age" not in json.loads((numbered.analysis / f"{name}.json").read_text()).get("silhouette", {})
    page, table = numbered.path / "page.html", numbered.path / "table.csv"
    monkeypatch.setattr(sys, "argv", ["report", str(numbered.path), "--out", str(page), "--csv", str(table)])
    report()
    text = page.read_text()
    assert "age</b>, ridge regression, R², on the test set, in&nbsp;%" in text
    result = read_result(numbered.probes(3) / "age.json")
    assert any(f"{100 * result.linear.accuracy:.1f}" in cell for cell in Page(text).row("debug-image"))
    assert ",R2" in table.read_text()


def test_without_labels_everything_else_works_and_the_rest_says_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = run_on(build(tmp_path / "data", {}), tmp_path / "run", online_every_steps=1)
    test_set = f"{tmp_path}/data/test"
    assert f"{test_set} have no label in common, so there is nothing to probe during training" in caplog.text
    said = f"nothing for a probe to predict: {tmp_path}/data/train has no label and {test_set} has no label, but both"
    with pytest.raises(UserError, match=said):
        probe_run(run_dir, ProbeOptions(), device=CPU)
    for name in ANALYSES:
        analysis = load_analysis(name)
        needs = {"feature_dropout": said, "concentration": f"but {test_set} lacks them"}
        if name in needs:
            with pytest.raises(UserError, match=needs[name]):
                analysis.analyze([LoadedRun(run_dir)], config=analysis.settings())
        else:
            analysis.analyze([LoadedRun(run_dir)], config=analysis.settings())
    monkeypatch.setattr(sys, "argv", ["report", str(run_dir.path), "--out", str(tmp_path / "page.html")])
    report()
    assert "has no label, so there is nothing to probe in" in (tmp_path / "page.html").read_text()
