"""The input of every analysis: samples with their own draws, and pictures that views can be made of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from configs import debug
from data_pipeline.__main__ import main as data_pipeline
from data_pipeline.core.errors import UserError
from tests.tiny_data import write_tiny_pair, write_tiny_sound_pair
from tests.trainer.analyses.planted import write_run
from trainer.analyses.analysis import LoadedRun
from trainer.analyze import load_analysis
from trainer.config import read_config
from trainer.preflight import check_data
from trainer.run_dir import RunDir


def analyze(name: str, run_dir: RunDir, **settings: int) -> list[Path]:
    analysis = load_analysis(name)
    config = analysis.settings.parse(settings, where=name)
    return analysis.analyze([LoadedRun(run_dir, step=0)], config=config)


@pytest.mark.parametrize("name", ["collision", "concentration", "filters"])
def test_analyses_of_pictures_refuse_sounds(name: str, tmp_path: Path) -> None:
    sounds = write_tiny_sound_pair(tmp_path / "sounds", num_train=4, num_test=4)
    with pytest.raises(UserError, match=rf"{name} needs pictures, but the samples of .* are sounds"):
        analyze(name, write_run(tmp_path / "run", sounds, recipe=debug.audio))


def test_no_train_picture_bears_the_very_overlay_of_a_test_picture(tmp_path: Path) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=41, num_test=4, overlay="online")
    run_dir = write_run(tmp_path / "run", data)
    config = json.loads(run_dir.config.read_text())
    config["data"]["test_dir"] = config["data"]["train_dir"]
    run_dir.config.write_text(json.dumps(config))
    loaded = LoadedRun(run_dir, step=0)
    same_NHW = (loaded.train.images(torch.arange(41)) == loaded.test.images(torch.arange(41))).all(1)
    assert not same_NHW.flatten(1).all(1).any()


def test_pictures_that_are_not_square_are_trained_on_and_analysed(tmp_path: Path) -> None:
    """The pictures of a folder, 16 x 24 pixels, with expert views."""
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("a", "b"):
            pictures = tmp_path / "source" / split / name
            pictures.mkdir(parents=True)
            for number in range(4):
                Image.fromarray(rng.integers(0, 256, (16, 24, 3), dtype=np.uint8)).save(pictures / f"{number}.png")
        where = ["--root", str(tmp_path / "source"), "--out", str(tmp_path / "data" / split)]
        data_pipeline(["build", "folder", "--split", split, "--workers", "1", *where])
    run_dir = write_run(tmp_path / "run", tmp_path / "data", recipe=debug.image)
    check_data(read_config(run_dir.config).override(["global_batch_size=8"], where="a test"))
    assert [path.is_file() for path in analyze("collision", run_dir, max_uses=2)] == [True, True]
