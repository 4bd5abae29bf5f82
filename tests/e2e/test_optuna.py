"""The search of docs/sweeps.md as it stands there: two runs at a time, bad ones ended early, and a report of them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.nursery import run_python
from tests.tiny_data import write_tiny_pair
from trainer.run_dir import RunDir

optuna = pytest.importorskip("optuna")

ROOT = Path(__file__).parents[2]
PRUNER = "optuna.pruners.MedianPruner(n_startup_trials=3)"


def search(directory: Path, data: Path, *, num_trials: int, pruner: str = PRUNER, num_epochs: int = 20) -> str:
    """Run the example on tiny data in `directory`, and return what it prints."""
    page = (ROOT / "docs" / "sweeps.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "import optuna" in block]
    settings = [f"data.train_dir={data / 'train'}", f"data.test_dir={data / 'test'}", "data.num_workers=0"]
    settings += ["tracking.wandb=disabled", "probe.online_every_steps=2", "checkpoint_every_steps=1000"]
    more = "".join(f', "--set", "{setting}"' for setting in settings)
    for old, new in (
        ('"--set", "probe.online_every_steps=10"', more.removeprefix(", ")),
        ("num_epochs=20", f"num_epochs={num_epochs}"),
        ("n_trials=8", f"n_trials={num_trials}"),
        (PRUNER, pruner),
    ):
        assert old in code
        code = code.replace(old, new)
    (directory / "search.py").write_text(code)
    environ = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = run_python([sys.executable, "search.py"], cwd=directory, env=environ, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=64, num_test=32)


def trials(directory: Path) -> list[str]:
    study = optuna.load_study(study_name="search", storage=f"sqlite:///{directory}/runs/search/optuna.db")
    return [trial.state.name for trial in study.trials]


def test_the_example_searches_is_resumed_and_reported(data: Path, tmp_path: Path) -> None:
    """The trial of the second search is pruned: it ends with a checkpoint."""
    assert "objective.temperature" in search(tmp_path, data, num_trials=2, num_epochs=3)
    search(tmp_path, data, num_trials=1, pruner="optuna.pruners.ThresholdPruner(lower=2.0)", num_epochs=500)
    assert trials(tmp_path) == ["COMPLETE", "COMPLETE", "PRUNED"]
    runs = sorted((tmp_path / "runs" / "search").glob("trial*"))
    assert [re.split("-", run.name)[0] for run in runs] == ["trial000", "trial001", "trial002"]
    assert ["finished_step" in RunDir(run).read_provenance() for run in runs] == [True, True, False]
    assert 0 < (RunDir(runs[-1]).latest_step() or 0) < 1000
    report = [sys.executable, "-m", "trainer.report", str(tmp_path / "runs" / "search"), "--out", "report.html"]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run_python(report, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "report.html").read_text()
    assert "Over the settings of the sweep" in page
    assert "by learning_rate</figcaption>" in page
