"""Runs that diverged: analyses, probe and report name what is not finite, and none fails."""

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
from tests.trainer.analyses.planted import write_run
from tests.trainer.reports.made_runs import report
from trainer.checkpoint.files import write_files
from trainer.config import read_run_config
from trainer.modules import build_modules
from trainer.run_dir import RunDir

# The analyses that read each module, with settings that make them quick.
READ_BY = {
    "viewmaker": {
        "views": ["num_shown=4"],
        "feature_dropout": ["num_examples=16", "num_uniform_samples=10"],
        "alignment": ["num_samples=16", "num_views=2"],
        "monitors": ["num_samples=16", "num_views=2"],
    },
    "encoder": {
        "feature_dropout": [],
        "alignment": ["num_samples=16", "num_views=2"],
        "monitors": ["num_samples=16", "num_views=2"],
        "tsne": ["num_samples=16"],
        "filters": ["num_pictures=16", "num_shown=4"],
    },
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=24, num_test=24)


def diverged_run(directory: Path, data: Path, module: str) -> RunDir:
    """Make a run whose checkpoint of step 10 has nan in every weight of a module."""
    probe = {"views": "none", "num_epochs": 1}  # no head can be fitted on views that are not finite
    run_dir = write_run(directory, data, recipe=debug.viewmaker, probe=probe)
    run_dir.checkpoint(10).mkdir(parents=True)
    states = {name: one.state_dict() for name, one in build_modules(read_run_config(run_dir)).trained_modules.items()}
    states[module] = {
        name: tensor * math.nan if tensor.is_floating_point() else tensor for name, tensor in states[module].items()
    }
    write_files(run_dir.checkpoint(10), step=10, states=states)
    run_dir.latest.write_text("step_00000010\n")
    return run_dir


def call(monkeypatch: pytest.MonkeyPatch, command: Any, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    command.main()


@pytest.mark.slow
@pytest.mark.parametrize("module", ["viewmaker", "encoder"])
def test_a_module_that_diverged_is_probed_analysed_and_reported(
    module: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = diverged_run(tmp_path / "run", data, module)
    refused = {}
    if module == "viewmaker":
        call(monkeypatch, trainer.probe, run.path)
        with pytest.raises(UserError, match=r"not all finite in epoch 1; probe with --set views=none if the views"):
            call(monkeypatch, trainer.probe, run.path, "--set", "views=policy")
    else:
        refused = {"tsne": "not finite or all equal", "feature_dropout": r"heads\.safetensors does not exist"}
        with pytest.raises(UserError, match=r"label_base cannot be probed|features are not all finite"):
            call(monkeypatch, trainer.probe, run.path)
    numbers = {}
    for name, small in READ_BY[module].items():
        arguments = [name, run.path, *(part for setting in small for part in ("--set", setting))]
        if name in refused:
            with pytest.raises(UserError, match=refused[name]):
                call(monkeypatch, trainer.analyze, *arguments)
            continue
        call(monkeypatch, trainer.analyze, *arguments)
        text = (run.analysis / f"{name}.json").read_text()
        assert "NaN" not in text
        assert "Infinity" not in text
        numbers[name] = json.loads(text)
    html = report(monkeypatch, tmp_path / "r.html", run.path)
    assert ">nan<" not in html
    if module == "viewmaker":
        assert "mean change of a pixel — no number" in html
        assert numbers["views"]["change"] is None
        assert numbers["alignment"]["spaces"]["embedding"]["alignment"] is None
        judgement = numbers["feature_dropout"]["judgements"][0]
        assert judgement["probabilities"]["dip"] is None
        assert judgement["accuracy"] is None
    else:
        assert numbers["filters"]["colour_r2"] is None
        assert numbers["filters"]["silhouette"] == {"base": None, "overlay": None}
