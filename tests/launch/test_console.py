"""The installed scripts do the same as the files, under their own names."""

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
from tests.tiny_data import write_tiny_pair
from trainer.run_dir import RunDir

ROOT = Path(__file__).parents[2]
FILES = {"train": "launch/train.py", "slurm": "launch/slurm.py", "status": "launch/status.py"}
MODULES = {"data": "data_pipeline"} | {
    name: f"trainer.{name}" for name in ("probe", "analyze", "report", "export", "replay", "theory")
}
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


def write_script(directory: Path, script: str, target: str) -> Path:
    directory.mkdir(exist_ok=True)
    module, name = target.split(":")
    path = directory / script
    path.write_text(SCRIPT.format(python=sys.executable, module=module, name=name))
    path.chmod(0o755)
    return path


def output(*command: str | Path, cwd: Path = ROOT) -> str:
    environ = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_command_has_a_script(entry_points: dict[str, str]) -> None:
    assert set(entry_points) == {f"overlay-{name}" for name in {**FILES, **MODULES}}
    for script, target in entry_points.items():
        module, name = target.split(":")
        assert getattr(importlib.import_module(module), name).func is console._run
        assert script == f"overlay-{name}"


@pytest.mark.process
@pytest.mark.parametrize("name", [*FILES, *MODULES])
def test_a_script_has_the_help_of_its_file_under_its_own_name(
    name: str, entry_points: dict[str, str], tmp_path: Path
) -> None:
    script = write_script(tmp_path / "bin", f"overlay-{name}", entry_points[f"overlay-{name}"])
    of_file = [FILES[name]] if name in FILES else ["-m", MODULES[name]]
    shown = output(script, "--help", cwd=tmp_path)
    expected = output(sys.executable, *of_file, "--help")
    assert shown.startswith(f"usage: overlay-{name} ")
    old = Path(FILES[name]).name if name in FILES else f"python -m {MODULES[name]}"
    words = expected.replace(f"usage: {old} ", f"usage: overlay-{name} ", 1).split()
    assert shown.split() == words


@pytest.mark.process
def test_a_script_trains_from_any_directory_and_is_recorded_as_typed(
    entry_points: dict[str, str], tmp_path: Path
) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=32, num_test=16)
    script = write_script(tmp_path / "bin", "overlay-train", entry_points["overlay-train"])
    words = ["--config", "debug:image", "--set", f"data.train_dir={data / 'train'}", "--set", "num_epochs=1"]
    words += ["--set", f"data.test_dir={data / 'test'}", "--set", "tracking.wandb=disabled", "--run-dir", "run"]
    output(script, *words, cwd=tmp_path)
    run_dir = RunDir(tmp_path / "run")
    assert run_dir.latest_step() == 1
    assert run_dir.read_provenance()["command"] == " ".join(["overlay-train", *words])


@pytest.mark.process
def test_torchrun_takes_the_module(tmp_path: Path) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=32, num_test=16)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["--config", "debug:image", "--set", f"data.train_dir={data / 'train'}", "--set", "num_epochs=1"]
    words += ["--set", f"data.test_dir={data / 'test'}", "--set", "tracking.wandb=disabled", "--run-dir", "run"]
    output(*torchrun, "-m", "launch.train", *words, cwd=tmp_path)
    assert RunDir(tmp_path / "run").read_provenance()["world_size"] == 2
