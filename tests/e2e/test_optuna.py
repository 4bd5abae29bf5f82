"""The search of docs/sweeps.md as it stands there: two runs at a time, a bad one ended early, and a report of them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.nursery import PythonProcess, run_python
from tests.tiny_data import on_data, write_tiny_pair
from tests.trainer.reports.made_runs import report
from trainer.run_dir import RunDir

optuna = pytest.importorskip("optuna")

ROOT = Path(__file__).parents[2]


def example(data: Path) -> str:
    """Return the example on tiny data, with two trials of 120 steps."""
    page = (ROOT / "docs" / "sweeps.md").read_text()
    blocks: list[str] = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (code,) = [block for block in blocks if "import optuna" in block]
    settings = on_data(data, "checkpoint_every_steps=1000", "num_epochs=60")
    more = ", ".join(f'"--set", "{setting}"' for setting in settings)
    changes = {'"--set", "num_epochs=20"': more, "n_trials=8": "n_trials=2", "time.sleep(0.5)": "time.sleep(0.1)"}
    changes["subprocess.Popen("] = "PythonProcess("
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    return code


def test_the_example_searches_and_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second trial is pruned as soon as it has logged the metric. Its run ends with a checkpoint."""
    data = write_tiny_pair(tmp_path / "data", num_train=64, num_test=32)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run_python([sys.executable, "-c", ""])  # starts the nursery before two threads need it
    names: dict[str, Any] = {"PythonProcess": PythonProcess}
    monkeypatch.setattr(
        optuna.Trial, "should_prune", lambda trial: trial.number == 1 and names["values"]("trial001") != []
    )
    exec(compile(example(data), "docs/sweeps.md", "exec"), names)
    assert [trial.state.name for trial in names["study"].trials] == ["COMPLETE", "PRUNED"]
    assert set(names["study"].best_params) == {"objective.temperature", "optimizer.learning_rate"}
    finished, pruned = sorted(Path("runs/search").glob("trial*"))
    assert (finished.name[:8], pruned.name[:8]) == ("trial000", "trial001")
    assert RunDir(finished).latest_step() == 120
    assert 0 < (RunDir(pruned).latest_step() or 0) < 120
    page = report(monkeypatch, Path("report.html"), "runs/search")
    assert "Over the settings of the sweep" in page
    assert "by learning_rate</figcaption>" in page
