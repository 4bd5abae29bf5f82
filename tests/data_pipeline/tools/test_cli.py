from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from PIL import Image

from data_pipeline.__main__ import main
from data_pipeline.building.catalogue import open_dataset
from data_pipeline.building.datasets import (
    DATASETS,
    DIGITS,
    PICTURE_OVERLAYS,
    SOURCE_SUMMARIES,
    SOURCES,
)
from data_pipeline.core.errors import UserError
from data_pipeline.overlays import PixelOverlay
from data_pipeline.overlays.registry import OVERLAYS, find_overlay
from data_pipeline.sources.digits import MnistKind
from tests.commands import Call
from tests.nursery import PythonProcess
from tests.real_data import REPOSITORY

Run = Callable[..., tuple[int, list[str], list[str]]]  # to exit status, lines of stdout, lines of stderr


@pytest.fixture
def run(call: Call) -> Run:
    def command(*arguments: str) -> tuple[int, list[str], list[str]]:
        done = call(main, *arguments)
        return done.status, done.stdout.splitlines(), done.stderr.splitlines()

    return command


@pytest.mark.slow
def test_build_verify_and_preview(tmp_path: Path, run: Run) -> None:
    built = str(tmp_path / "built")
    build = ["build", "procedural_letters", "--out", built, "--limit", "40", "--samples-per-shard", "20"]
    build += ["--workers", "1"]
    status, out, err = run(*build)
    assert status == 0
    assert out[0].startswith(f"{built} built: 40 samples in 2 shards, ")
    assert out[1].startswith("samples: pictures of 32 x 32 pixels, 0.")
    assert out[2].startswith("label_base, picture: 10 classes of 4 samples each, stripes, waves, ")
    assert out[2].endswith(", crosses, blobs")
    assert re.match(r"label_overlay, letter: 26 classes of 0 to \d samples each, A, B, .*, L, \.\.\.$", out[3])
    assert out[4:] == ["overlay: letters, drawn into the shards", "made from: procedural; split train, seed 0"]
    assert err[-1].startswith(f"building {built}: 40/40 in ")

    status, out, _ = run(*build)
    assert status == 0
    assert "exists already, built from the same data with the same arguments" in out[0]

    status, out, err = run(*build, "--seed", "1")
    assert (status, out) == (2, [])
    assert err == [f"error: {built} was built with seed 0, not 1; choose another directory or remove it"]

    status, out, _ = run("verify", built)
    assert (status, len(out)) == (0, 1)
    assert out[0].startswith(f"{built} is sound: 40 samples in 2 shards")

    picture = str(tmp_path / "grid.png")
    assert run("preview", built, "--out", picture)[:2] == (0, [picture])
    assert Image.open(picture).size[0] > 900

    shard = tmp_path / "built" / "shard-00001.tar"
    shard.unlink()
    status, out, err = run("verify", built)
    assert (status, len(out)) == (1, 2)
    assert out[0].startswith(f"shard-00001.tar: {shard} is in the index {built}, but it is not there; ")
    assert err[-1].startswith("copy the named files again")
    assert out[-1].startswith(f"{built} has 1 problem: 20 of 40 samples sound in 2 shards")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: COMMAND; see `python -m data_pipeline --help`"),
        (("build", "procedural", "--out", "{tmp}/x", "--sede", "1"), "unrecognized arguments: --sede"),
        (("verify", "{tmp}/x"), "{tmp}/x does not exist; build it with"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(
    arguments: tuple[str, ...], message: str, tmp_path: Path, run: Run
) -> None:
    filled = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    status, out, err = run(*filled)
    assert (status, out) == (2, [])
    assert len(err) == 1
    assert err[0].startswith("error: ")
    assert message.replace("{tmp}", str(tmp_path)) in err[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dataset", ["cifar10", "folder", "mnist_bits", "procedural_letters", "spoken_noise", "noise"])
def test_a_dataset_takes_the_sources_that_the_help_names_and_no_other(dataset: str) -> None:
    for source in SOURCE_SUMMARIES:
        try:
            open_dataset(dataset, source=source, limit=1)
            said = ""
        except UserError as error:
            said = str(error)
        refused = f'{dataset} cannot come from the source "{source}"; ' in said
        assert refused == (source not in SOURCES[DATASETS[dataset].base])
        assert refused or not said or "; name it with --" in said  # --root, or an option of the overlay


@pytest.mark.process
@pytest.mark.parametrize("num_tars", [0, 4], ids=["while workers start", "while both write"])
def test_ctrl_c_ends_a_build_without_a_traceback_and_leaves_nothing(num_tars: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "data_pipeline", "build", "procedural", "--out", str(tmp_path / "data")]
    command += ["--limit", "9600", "--samples-per-shard", "80", "--workers", "2"]
    with PythonProcess(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, start_new_session=True) as build:
        deadline = time.monotonic() + 60
        partial = tmp_path / "data.partial"
        while len(list(partial.glob("*.tar"))) < num_tars or not partial.is_dir():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.5 if num_tars == 0 else 0)  # the first worker is about to start
        os.killpg(build.pid, signal.SIGINT)  # as a terminal sends it: to all processes of the build
        assert build.stderr is not None
        said = build.stderr.read()
    assert build.returncode == 130
    assert "Traceback" not in said
    assert said.splitlines()[-1] == "interrupted"
    assert list(tmp_path.iterdir()) == []


def test_the_help_names_what_the_overlays_and_sources_offer() -> None:
    """The names stand apart from the code that they name, so that the help needs none of it."""
    assert [kind for kind in OVERLAYS if issubclass(find_overlay(kind), PixelOverlay)] == [*PICTURE_OVERLAYS]
    assert (*get_args(MnistKind), "sklearn") == DIGITS
