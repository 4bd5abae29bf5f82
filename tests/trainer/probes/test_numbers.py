"""Labels that are numbers are left out, and data without labels: what every reader of a run says of them."""

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

from configs import debug
from data_pipeline.building.build import build_dataset
from data_pipeline.core.errors import UserError
from data_pipeline.storage.manifest import LabelEntry
from trainer.analyses.analysis import LoadedRun
from trainer.analyze import ANALYSES, load_analysis
from trainer.config import RunConfig
from trainer.probed_runs.probing import ProbeOptions, probe_run
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


def build(home: Path, columns: dict[str, Sequence[Sequence[object]]], *, num: int = 48) -> Path:
    """Build train and test sets of grey pictures, each with labels from a table of its own."""
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


def run_on(data: Path, directory: Path, **probe_settings: Any) -> RunDir:
    config = debug.image().model_dump()
    config["data"] |= {"train_dir": f"{data}/train", "test_dir": f"{data}/test", "num_workers": 0}
    config["encoder"] |= {"width": 2}
    config["probe"] |= {"num_epochs": 2, "views": "none"} | probe_settings
    config |= {"global_batch_size": 16, "num_epochs": 1, "tracking": config["tracking"] | {"wandb": "disabled"}}
    train(RunConfig.model_validate(config), RunDir(directory), device=CPU, command="test")
    return RunDir(directory)


def test_every_reader_of_a_run_leaves_numbers_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    age = [[f"{row + shift:.2f}" for row in range(48)] for shift in (0.25, 0.75)]  # no test age is a train age
    night = [["day" if row > 24 else "night" for row in range(48)] for _ in range(2)]
    site = [["ab"[row % 2] for row in range(48)], [""] * 48]
    data = build(tmp_path / "data", {"age": age, "night": night, "site": site})
    run_dir = run_on(data, tmp_path / "run", online_every_steps=2)
    assert any("probe/night/knn" in entry for entry in run_dir.read_metrics())
    assert not any("probe/age/knn" in entry for entry in run_dir.read_metrics())
    probe_run(run_dir, ProbeOptions(), device=CPU)
    assert [path.stem for path in run_dir.probes(3).glob("*.json")] == ["night"]
    assert "not probed, because only one of both sets has samples with it, " in caplog.text
    for name in ("alignment", "filters", "feature_dropout"):
        analysis = load_analysis(name)
        analysis.analyze([LoadedRun(run_dir)], config=analysis.settings())
        assert "age" not in json.loads((run_dir.analysis / f"{name}.json").read_text()).get("silhouette", {})


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
        needs = {"concentration": f"but {test_set} lacks them"}
        needs |= dict.fromkeys(("feature_dropout", "play", "mistakes"), said)
        if name in needs:
            with pytest.raises(UserError, match=needs[name]):
                analysis.analyze([LoadedRun(run_dir)], config=analysis.settings())
        else:
            analysis.analyze([LoadedRun(run_dir)], config=analysis.settings())
    monkeypatch.setattr(sys, "argv", ["report", str(run_dir.path), "--out", str(tmp_path / "page.html")])
    report()
    assert "has no label, so there is nothing to probe in" in (tmp_path / "page.html").read_text()
