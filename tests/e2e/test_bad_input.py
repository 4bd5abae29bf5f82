"""Every mistake a user can make at the command line: one sentence on stderr, exit status 2, nothing half-written."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from configs import resolve_recipe
from launch import train as launch_train
from tests.commands import Call
from tests.nursery import run_python
from tests.real_data import REPOSITORY
from tests.tiny_data import write_tiny_dataset, write_tiny_pair, write_tiny_sounds
from trainer.run_dir import write_json


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=40, num_test=20)


Run = Callable[..., str]


@pytest.fixture
def train(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> Run:
    """Runs the train command in this process; returns its one line on stderr after checking the exit status."""

    def run(*arguments: str, status: int = 2) -> str:
        monkeypatch.chdir(tmp_path)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"):
            monkeypatch.delenv(name, raising=False)
        settings = (f"data.train_dir={data / 'train'}", f"data.test_dir={data / 'test'}", "tracking.wandb=disabled")
        others = [setting for setting in settings if f"{setting.partition('=')[0]}=" not in " ".join(arguments)]
        done = call(launch_train.main, *sets(*others), *arguments)
        assert done.status == status
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        return errors[0]

    return run


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config", "debug:imag"], 'did you mean "debug:image"'),
        (["--config", "debug:image", *sets("num_epoch=3")], 'did you mean "num_epochs"'),
        (["--config", "debug:image", *sets("num_epochs=many")], 'num_epochs is "many"; it must be'),
        (["--config", "debug:image", *sets("global_batch_size=64")], "40"),
        (["--config", "debug:image", *sets("data.train_dir=nowhere")], "python -m data_pipeline build"),
        (["--config", "debug:image", *sets("data.train_dir=.")], "manifest.json"),
        (["--config", "debug:image", *sets("data.train_dir=http://127.0.0.1:9/a")], "http://127.0.0.1:9/a"),
        (["--config", "debug:image", *sets("data.train_dir=http://a:key@b:9/a", "x=1")], "http://***@b:9/a"),
        (["--config", "debug:audio"], "holds pictures, but data.sample_rate is 8000"),
        (["--config", "debug:image", *sets("views.kind=spectral")], "are for sounds, not for pictures"),
    ],
)
def test_a_mistake_leaves_no_run_directory(train: Run, words: list[str], said: str, tmp_path: Path) -> None:
    assert said in train(*words, "--run-dir", "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("built", "asked"), [("baked", "online"), ("online", "baked"), ("baked", "online_per_view")])
def test_an_overlay_drawn_otherwise_than_the_recipe_says(train: Run, tmp_path: Path, built: Any, asked: str) -> None:
    train_dir = write_tiny_dataset(tmp_path / "train", num_samples=40, overlay=built)
    test_dir = write_tiny_dataset(tmp_path / "test", num_samples=20, overlay=built)
    settings = sets(f"data.train_dir={train_dir}", f"data.test_dir={test_dir}", f"data.overlay={asked}")
    error = train("--config", "debug:image", *settings)
    assert f"the overlay of {train_dir} is {built}, but data.overlay is {asked}" in error
    assert f"data.overlay={built}" in error


@pytest.mark.parametrize(
    ("recipe", "setting", "said"),
    [
        (
            "debug:image",
            "seed=0",
            "holds sounds of 8000 points a second, but data.sample_rate is None; use a recipe for",
        ),
        ("debug:audio", "data.sample_rate=48000", "holds sounds of 8000 points a second, but data.sample_rate is"),
    ],
)
def test_sounds_that_do_not_fit_the_config(train: Run, tmp_path: Path, recipe: str, setting: str, said: str) -> None:
    sounds = write_tiny_sounds(tmp_path / "sounds", num_samples=40)
    settings = sets(f"data.train_dir={sounds}", f"data.test_dir={sounds}", setting)
    assert said in train("--config", recipe, *settings)
    assert not (tmp_path / "runs").exists()


def test_a_run_directory_that_holds_another_config(train: Run, tmp_path: Path) -> None:
    config = tmp_path / "run" / "config.json"
    train("--config", "debug:image", "--set", "global_batch_size=64", "--run-dir", str(tmp_path / "run"))
    assert not config.exists()  # a run that could not start claims nothing
    write_json(config, resolve_recipe("debug:image").model_dump(mode="json"))
    before = config.read_bytes()
    error = train("--config", "debug:image", "--set", "optimizer.learning_rate=0.5", "--run-dir", str(tmp_path / "run"))
    assert "optimizer.learning_rate" in error
    assert config.read_bytes() == before


def test_a_directory_that_is_not_a_run_is_left_alone(train: Run, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("...")
    assert "thesis" in train("--config", "debug:image", "--run-dir", "thesis")
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter1.tex"]


def test_a_global_batch_that_the_ranks_do_not_divide(data: Path, tmp_path: Path) -> None:
    """Under torchrun: only the first rank speaks, and torchrun itself ends non-zero."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "launch/train.py", "--config", "debug:image", "--run-dir", str(tmp_path / "run")]
    command += sets(f"data.train_dir={data / 'train'}", f"data.test_dir={data / 'test'}", "global_batch_size=33")
    done = run_python(command, cwd=REPOSITORY, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors == [
        "error: global_batch_size 33 cannot be divided by 2 ranks; set it to a multiple of 2",
    ]
    tracebacks = done.stderr.split("Traceback (most recent call last)")[1:]
    assert len(tracebacks) == 1  # torchrun's own report that a child failed
    assert "ChildFailedError" in tracebacks[0]
    assert not (tmp_path / "run").exists()


def test_a_device_without_room_is_one_sentence(train: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."
        )

    monkeypatch.setattr("launch.rank.train", out_of_memory)
    said = train("--config", "debug:image")
    assert (
        "not enough memory on cpu (CUDA out of memory. Tried to allocate 2.00 GiB); in another --run-dir, raise memory"
        in said
    )
