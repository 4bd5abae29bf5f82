"""A train set and a test set that were built with other options are told apart, if the options should be equal."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from webdataset import TarWriter

from configs import resolve_recipe
from data_pipeline.building.build import build_dataset
from data_pipeline.building.index_tars import make_index
from data_pipeline.storage.manifest import Fields, Manifest, load_manifest
from trainer.probed_runs.probing import ProbeOptions, probe_run
from trainer.probes.targets import option_difference
from trainer.run_dir import RunDir
from trainer.train import train

TWO_DIGITS, TILED = "placed_digits_second_digit", "procedural_tiled_digit"
SMALL = {"digit_size": "12", "kind": "sklearn", "image_size": "32"}


PNG = io.BytesIO()
Image.new("RGB", (16, 16)).save(PNG, "PNG")


def built(directory: Path, dataset: str, split: Any, *, num: int = 8, **settings: Any) -> Manifest:
    given: dict[str, Any] = {"source_options": SMALL} if dataset == TWO_DIGITS else {}
    options = {"digits": "sklearn", **settings.pop("overlay_options", {})}
    build_dataset(
        dataset, directory, split=split, limit=num, overlay="online", overlay_options=options, **given | settings
    )
    return load_manifest(directory)


@pytest.mark.parametrize(
    ("dataset", "in_train", "in_test", "said"),
    [
        (TWO_DIGITS, {"size": "12"}, {"size": "12"}, None),
        (
            TWO_DIGITS,
            {"size": "12"},
            {"size": "14"},
            "the overlay's size is 12 in the train set but 14 in the test set",
        ),
        ("procedural_dominoes", {"correlation": "0.9"}, {}, None),
        (TILED, {"unique": "20"}, {"unique": "20"}, None),
    ],
)
def test_options_of_both_splits_are_compared(
    dataset: str, in_train: dict[str, str], in_test: dict[str, str], said: str | None, tmp_path: Path
) -> None:
    train_set, test_set = (
        built(tmp_path / split, dataset, split, overlay_options=options)
        for split, options in (("train", in_train), ("test", in_test))
    )
    found = option_difference(train_set, test_set)
    assert found is None if said is None else found is not None and found.startswith(said)


def test_options_of_the_source_and_the_seed_of_chosen_digits_are_compared(tmp_path: Path) -> None:
    small = built(tmp_path / "small", TWO_DIGITS, "train")
    large = built(tmp_path / "large", TWO_DIGITS, "test", source_options=SMALL | {"digit_size": "14"})
    said = "the source's digit_size is 12 in the train set but 14 in the test set"
    assert option_difference(small, large) == said
    one, other = (
        built(tmp_path / split, TILED, split, seed=seed, overlay_options={"unique": "20"})
        for seed, split in enumerate(("train", "test"))
    )
    assert option_difference(one, other) == "the 20 digits of the test set are not those of the train set"


def test_the_volume_of_background_sounds_is_compared(tmp_path: Path) -> None:
    def heard(name: str, split: str, **options: Any) -> Manifest:
        arguments: dict[str, Any] = {"source": "procedural", "split": split, "limit": 6, "overlay": "online"}
        return build_dataset("spoken_noise", tmp_path / name, overlay_options=options, **arguments)

    train_set, test_set = heard("train", "train"), heard("test", "test")
    assert option_difference(train_set, test_set) is None  # though the test split hears other parts
    loud = heard("loud", "test", noise_volume=0.5)
    said = "the overlay's noise_volume is 0.05 in the train set but 0.5 in the test set"
    assert option_difference(train_set, loud) == said


@pytest.mark.parametrize(
    ("in_train", "in_test", "said"),
    [
        ("json:coarse", "json:coarse", None),
        (
            "json:coarse",
            "cls",
            "label_base is the field json:coarse in the train set but cls in the test set",
        ),
        ("json:coarse", None, "label_base is the field json:coarse in the train set but cls in"),
        (None, None, None),
    ],
)
def test_the_fields_of_labels_of_tars_are_compared_and_those_of_pictures_are_not(
    in_train: str | None, in_test: str | None, said: str | None, tmp_path: Path
) -> None:
    manifests = []
    for extension, field in (("png", in_train), ("jpg", in_test)):
        tar = tmp_path / extension / "x.tar"
        tar.parent.mkdir()
        with TarWriter(str(tar), encoder=False) as writer:
            writer.write({"__key__": "a", extension: PNG.getvalue(), "cls": b"1", "json": b'{"coarse": 1}'})
        labels = None if field is None else {"base": field}
        fields = Fields(content=(extension,), labels=labels)
        manifests.append(make_index(str(tar), tmp_path / extension / "index", fields=fields, size=16)[0])
    found = option_difference(*manifests)
    assert (found or "").startswith(said or "")
    assert (found is None) == (said is None)


@pytest.mark.process
def test_training_and_probe_warn_of_a_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    for split, size in (("train", "12"), ("test", "14")):
        built(tmp_path / split, TWO_DIGITS, split, num=32, overlay_options={"size": size})
    words = [f"data.train_dir={tmp_path}/train", f"data.test_dir={tmp_path}/test", "data.overlay=online"]
    words += ["num_epochs=1", "tracking.wandb=disabled", "probe.num_epochs=1", "probe.views=none"]
    config, run_dir = resolve_recipe("debug:image", words), RunDir(tmp_path / "run")
    train(config, run_dir, device=torch.device("cpu"), command="test")
    said = "the overlay's size is 12 in the train set but 14 in the test set"
    assert f"{said}; build both with the same --seed and options" in caplog.text
    probe_run(run_dir, ProbeOptions(), device=torch.device("cpu"))
    assert f"warning: {said}; the accuracies measure this difference too" in capsys.readouterr().err
