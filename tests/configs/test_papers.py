"""`data_pipeline papers`: what it builds is what the studies of the papers read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from configs import studies
from configs.resolve import studies as known
from data_pipeline.__main__ import main
from data_pipeline.building.papers import PICTURES, parts_of_papers
from data_pipeline.building.suppression import Files
from data_pipeline.core.errors import UserError
from data_pipeline.storage.manifest import load_manifest
from tests.data_pipeline.building.test_suppression_settings import write_mnist


def test_what_the_studies_read_is_what_is_built() -> None:
    of_papers = [name.partition(":")[2] for name in known() if "suppression" not in name and "debug" not in name]
    datasets = [run.data for study in of_papers for run in getattr(studies, study)()]
    read = {directory for data in datasets for directory in (data.train_dir, data.test_dir)}
    parts = [
        part for small in (False, True) for part in parts_of_papers(Path("data"), small=small, files=Files(Path()))
    ]
    assert {str(part.directory) for part in parts} == read


def test_what_lacks_files_is_named_with_their_address_and_the_rest_is_built(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for split, prefix in (("train", "train"), ("test", "t10k")):
        write_mnist(tmp_path, num=20, prefix=prefix)
        for number in range(20):
            folder = tmp_path / split / f"class{number % 10}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    command = ["papers", "--root", str(tmp_path), "--out", str(tmp_path / "data"), "--small", "--cifar", "folder"]
    for limit in ("10", "10", "5"):
        with pytest.raises(UserError) as told:
            main([*command, "--limit", limit])
        for name in ("spoken", "noise", "spoken_noise"):
            assert f"{name} was not built: " in str(told.value)
        assert str(told.value).count("https://github.com/") == 3
    for name in PICTURES:
        assert f"{name} was not built: " in str(told.value)  # it is there with another limit
        manifest = load_manifest(tmp_path / "data" / "small" / name / "train")
        assert manifest.num_samples == 10
        assert (manifest.overlay is None) == (name == "cifar10")
