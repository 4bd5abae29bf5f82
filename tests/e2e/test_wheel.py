"""A wheel holds every file of the packages and nothing else, and works in another directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.real_data import REPOSITORY
from tests.test_house import ROOMS, tracked_files

# Run one command of Python after another in this process. A command is the words that come after `python -m`.
RUN_ALL = """
import json, runpy, sys
for words in json.loads(sys.argv[1]):
    sys.argv[:] = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
import configs, data_pipeline, launch, trainer
print(trainer.__file__, launch.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tracked files, built without a network."""
    if tuple(map(int, metadata.version("setuptools").split(".")[:2])) < (70, 1) and not os.environ.get("CI"):
        pytest.skip("setuptools 70.1 or newer is needed to build a wheel")
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"  # a copy, because a build writes into its source
    for path in tracked_files():
        if path.parts[0] in {*ROOMS, "setup.py"}:
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / path, source / path)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"  # as pip does
    subprocess.run([sys.executable, "-c", build, str(directory)], cwd=source, check=True, capture_output=True)
    (built,) = directory.glob("*.whl")
    return built


def test_its_files_are_those_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == {str(path) for path in tracked_files() if path.parts[0] in ROOMS}


def test_it_builds_trains_and_reports_in_another_directory(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1", "WANDB_MODE": "disabled"}

    commands = []
    for split in ("train", "test"):  # letters read a font of the package
        build = ["data_pipeline", "build", "procedural_letters", "--split", split, "--limit", "32", "--workers", "1"]
        commands.append([*build, "--out", f"data/debug/{split}"])
    settings = ["--set", "num_epochs=1", "--set", "data.num_workers=0"]
    commands.append(["launch.train", "--config", "debug:image", "--run-dir", "run", *settings])
    commands.append(["trainer.report", "run", "--out", "report.html"])
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, json.dumps(commands)],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == [f"{site}/trainer/__init__.py", f"{site}/launch/__init__.py"]
    page = (elsewhere / "report.html").read_text()
    assert "<style>" in page
    assert "letter" in page
    assert '"git_commit": null' in (elsewhere / "run" / "provenance.json").read_text()
