"""Runs that diverged: every analysis, probe and report names what is not finite, and none fails."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

import trainer.analyze
import trainer.probe
from configs import debug
from data_pipeline.core.errors import UserError
from tests.tiny_data import write_tiny_pair
from tests.trainer.reports.made_runs import report
from trainer.checkpoint.files import write_files
from trainer.config import RunConfig
from trainer.modules import build_modules
from trainer.run_dir import RunDir, write_json

SMALL = {
    "views": ["num_pictures=16"],
    "feature_dropout": ["num_examples=16", "num_uniform_samples=10"],
    "alignment": ["num_samples=16", "num_views=2"],
    "concentration": [],
    "embedding": ["num_samples=16"],
    "collision": ["num_pictures=9", "max_uses=2"],
    "monitors": ["num_samples=16", "num_views=2"],
    "filters": ["num_pictures=16", "num_steps=2", "num_shown=8"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=40, num_test=24)


def diverged_run(directory: Path, data: Path, players: set[str]) -> RunDir:
    """Make a run whose checkpoint of step 10 has nan in every weight of some modules."""
    config = debug.viewmaker().model_dump()
    config["probe"] |= {"views": "none", "num_epochs": 1}  # no head can be fitted on views that are not finite
    config["data"] |= {"train_dir": str(data / "train"), "test_dir": str(data / "test")}
    run_dir = RunDir(directory)
    run_dir.checkpoint(10).mkdir(parents=True)
    write_json(run_dir.config, config)
    states = {
        name: {
            key: tensor * math.nan if name in players and tensor.is_floating_point() else tensor
            for key, tensor in module.state_dict().items()
        }
        for name, module in build_modules(RunConfig.model_validate(config)).trained_modules.items()
    }
    write_files(run_dir.checkpoint(10), step=10, states=states)
    run_dir.latest.write_text("step_00000010\n")
    return run_dir


def call(monkeypatch: pytest.MonkeyPatch, command: Any, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    command.main()


@pytest.mark.slow
def test_a_viewmaker_that_diverged_is_analysed_probed_and_reported(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = diverged_run(tmp_path / "run", data, {"viewmaker"})
    other = diverged_run(tmp_path / "other", data, {"viewmaker"})
    for one in (run, other):
        call(monkeypatch, trainer.probe, one.path, "--untrained")
    with pytest.raises(
        UserError, match=r"features are not all finite in epoch 1; probe with --views none if the views"
    ):
        call(monkeypatch, trainer.probe, run.path, "--views", "policy")
    html = report(monkeypatch, tmp_path / "first.html", run.path)  # which makes the views
    assert "mean change of a pixel — no number" in html
    assert json.loads((run.analysis / "views.json").read_text())["change"] is None
    for name, small in SMALL.items():
        runs = [run.path, other.path] if name == "feature_dropout" else [run.path]
        call(monkeypatch, trainer.analyze, name, *runs, *(part for setting in small for part in ("--set", setting)))
        written = (run.analysis / f"{name}.json").read_text()
        assert "NaN" not in written
        assert "Infinity" not in written
    assert json.loads((run.analysis / "alignment.json").read_text())["spaces"]["embedding"]["alignment"] is None
    judgement = json.loads((run.analysis / "feature_dropout.json").read_text())["judgements"][0]
    assert judgement["probabilities"]["dip"] is None
    assert judgement["accuracy"] is None
    html = report(monkeypatch, tmp_path / "second.html", run.path)
    assert ">nan<" not in html


@pytest.mark.slow
def test_an_encoder_that_diverged_is_analysed_probed_and_reported(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = diverged_run(tmp_path / "run", data, {"encoder"})
    other = diverged_run(tmp_path / "other", data, {"encoder"})
    refused = {
        "embedding": r"features .* at step 10 are not all finite; take another --step",
        "feature_dropout": r"heads\.safetensors does not exist; fit the heads with",
    }
    with pytest.raises(UserError, match=r"label_base cannot be probed|features are not all finite"):
        call(monkeypatch, trainer.probe, run.path)
    for name, small in SMALL.items():
        runs = [run.path, other.path] if name == "feature_dropout" else [run.path]
        arguments = [name, *runs, *(part for setting in small for part in ("--set", setting))]
        if name in refused:
            with pytest.raises(UserError, match=refused[name]):
                call(monkeypatch, trainer.analyze, *arguments)
            continue
        call(monkeypatch, trainer.analyze, *arguments)
        assert "NaN" not in (run.analysis / f"{name}.json").read_text()
    filters = json.loads((run.analysis / "filters.json").read_text())
    assert filters["colour_r2"] is None
    assert filters["silhouette"] == {"base": None, "overlay": None}
    assert "alignment" in report(monkeypatch, tmp_path / "r.html", run.path)
