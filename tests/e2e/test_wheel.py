"""A wheel, built from an sdist, holds every file of the packages and nothing else, and works where it is installed."""

from __future__ import annotations

import json
import os
import re
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
    """The wheel of an sdist of the tracked files, alone in its directory, built without a network."""
    if tuple(map(int, metadata.version("setuptools").split(".")[:2])) < (70, 1) and not os.environ.get("CI"):
        pytest.skip("setuptools 70.1 or newer is needed to build a wheel")
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"  # a copy, because a build writes into its source
    for path in tracked_files():
        if path.parts[0] in {*ROOMS, "setup.py"}:
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / path, source / path)
    shutil.unpack_archive(build("sdist", source), directory)
    (unpacked,) = directory.glob("feature_dropout-*")
    return build("wheel", unpacked)


def build(kind: str, source: Path) -> Path:
    """Build the sdist or the wheel of a source directory as pip does, and return its path."""
    code = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])('dist')"
    subprocess.run([sys.executable, "-c", code, f"build_{kind}"], cwd=source, check=True, capture_output=True)
    (built,) = source.joinpath("dist").iterdir()
    return built


def test_its_files_are_those_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == {str(path) for path in tracked_files() if path.parts[0] in ROOMS}


def test_the_changelog_and_the_citation_have_its_version(wheel: Path) -> None:
    version = wheel.name.split("-")[1]
    assert re.findall(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == version
    assert f"\nversion: {version}\n" in (REPOSITORY / "CITATION.cff").read_text()


def test_it_is_installed_from_a_directory_of_wheels_and_builds_trains_and_reports_elsewhere(
    wheel: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--pre"]
    install += ["--find-links", str(wheel.parent), "--target", str(site), "feature-dropout"]
    subprocess.run(install, check=True, env=os.environ | {"PIP_CONFIG_FILE": os.devnull})
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
