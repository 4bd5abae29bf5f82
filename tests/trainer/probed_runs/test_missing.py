"""`--missing` probes the runs that lack results, and no others."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from tests.tiny_data import write_tiny_pair
from tests.trainer.probed_runs.test_probe_command import call, make_run
from trainer.probes.result import read_result
from trainer.run_dir import RunDir, write_json

SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=48, num_test=16)


def make_study(home: Path, data: Path) -> list[RunDir]:
    probe = {"num_epochs": 2, "views": "none"}
    return [make_run(home / f"run{seed}", data, name=f"run{seed}", seed=seed, probe=probe) for seed in SEEDS]


@pytest.mark.slow
def test_what_is_missing_is_probed_and_nothing_else(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = make_study(tmp_path / "study", data)
    call(monkeypatch, study[0].path, "--untrained")
    call(monkeypatch, study[1].path)
    capsys.readouterr()

    def probed(*options: str) -> set[str]:
        """Probe what is missing, and return the names of the runs that got results."""
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "study").rglob("probes/step_00000010/*.json")}
        call(monkeypatch, tmp_path / "study", "--missing", *options)
        after = {path: path.stat().st_mtime_ns for path in (tmp_path / "study").rglob("probes/step_00000010/*.json")}
        return {path.parts[-4] for path, at in after.items() if before.get(path) != at}

    assert probed() == {"run2"}
    assert "2 of 3 run(s) are probed already" in capsys.readouterr().out
    assert probed() == set()
    assert probed("--untrained") == {"run1", "run2"}
    (study[0].probes(10) / "base.json").write_text("{")
    assert probed("--untrained") == {"run0"}
    assert read_result(study[0].probes(10) / "base.json").checkpoint_step == 10
    study[2].latest.unlink()  # what is left of an unpacked run
    shutil.rmtree(study[2].checkpoints)
    write_json(study[2].provenance, {"finished_step": 10})
    assert probed("--all-steps") == set()
    os.utime(study[1].checkpoint(10), (time.time() + 60, time.time() + 60))  # trained again
    assert probed() == {"run1"}
