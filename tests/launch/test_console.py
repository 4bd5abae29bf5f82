"""The installed scripts."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools

from launch import console
from tests.nursery import run_python
from tests.tiny_data import write_tiny_pair
from trainer.run_dir import RunDir

ROOT = Path(__file__).parents[2]
NAMES = {"train", "slurm", "status", "data", "probe", "analyze", "report", "export", "theory"}
# What pip writes into the bin directory for an entry point.
SCRIPT = "#!{python}\nimport sys\nfrom {module} import {name}\nif __name__ == '__main__':\n    sys.exit({name}())\n"


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the scripts of setup.py: for each name its `module:function`."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **settings: given.update(settings))
    monkeypatch.chdir(ROOT)
    exec(compile((ROOT / "setup.py").read_text(), "setup.py", "exec"), {})
    scripts: list[str] = given["entry_points"]["console_scripts"]
    return dict(re.split(r"\s*=\s*", script) for script in scripts)


def test_every_command_has_a_script(entry_points: dict[str, str]) -> None:
    assert set(entry_points) == {f"overlay-{name}" for name in NAMES}
    for script, target in entry_points.items():
        module, name = target.split(":")
        assert getattr(importlib.import_module(module), name).func is console._run
        assert script == f"overlay-{name}"


@pytest.mark.process
def test_a_script_trains_from_any_directory_and_is_recorded_as_typed(
    entry_points: dict[str, str], tmp_path: Path
) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=32, num_test=16)
    module, name = entry_points["overlay-train"].split(":")
    script = tmp_path / "overlay-train"
    script.write_text(SCRIPT.format(python=sys.executable, module=module, name=name))
    words = ["--config", "debug:image", "--set", f"data.train_dir={data / 'train'}", "--set", "num_epochs=1"]
    words += ["--set", f"data.test_dir={data / 'test'}", "--set", "tracking.wandb=disabled", "--run-dir", "run"]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = run_python([sys.executable, script, *words], cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    run_dir = RunDir(tmp_path / "run")
    assert run_dir.latest_step() == 1
    assert run_dir.read_provenance()["starts"][0]["command"] == " ".join(["overlay-train", *words])


@pytest.mark.process
def test_another_package_that_hides_one_of_ours_is_named_with_both_places(tmp_path: Path) -> None:
    """Not trainer: an editable install finds its modules even then."""
    other = tmp_path / "configs/__init__.py"
    other.parent.mkdir()
    other.touch()
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "launch.train", "--list"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == f"error: Python finds configs at {other}, which hides {ROOT}/configs; remove or rename it\n"


@pytest.mark.process
@pytest.mark.parametrize("name", ["train", "slurm", "status"])
def test_a_script_runs_the_code_beside_it_and_not_that_of_a_clone_that_is_installed(name: str, tmp_path: Path) -> None:
    for file, text in {
        f"launch/{name}.py": (ROOT / f"launch/{name}.py").read_text(),
        "data_pipeline/__init__.py": "raise SystemExit('this clone')",
    }.items():
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(text)
    command = [sys.executable, str(tmp_path / f"launch/{name}.py")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=60)
    assert done.stderr == b"this clone\n"
