"""An overlay that changes the shape of a picture: what the encoder gets decides, not what is stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from configs import debug
from data_pipeline.building.build import build_dataset
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.overlays.bits import Bits
from data_pipeline.storage.manifest import Manifest
from trainer.data import Manifests
from trainer.mixture import MixtureManifest
from trainer.open_settings import decide, decisions_to_record, input_size, normalization_of
from trainer.preflight import check_manifests
from trainer.views.expert_image import ExpertImage, ExpertImageConfig


def dominoes(directory: Path, **options: str | float) -> Manifest:
    return build_dataset("procedural_dominoes", directory, limit=60, overlay="online", overlay_options=options)


def test_the_settings_of_an_encoder_are_decided_by_the_shape_in_a_batch(tmp_path: Path) -> None:
    manifest = dominoes(tmp_path / "a")
    config = debug.image()
    found = normalization_of(manifest)
    assert found is not None
    assert (found.mean, found.std) == (manifest.batch_mean, manifest.batch_std)
    assert found.mean != manifest.mean
    assert input_size(config, manifest.batch_shape) == (64, 32)
    open_config = config.model_copy(update={"encoder": config.encoder.model_copy(update={"mean": None, "std": None})})
    assert decide(open_config, manifest).encoder.normalization == found
    assert decisions_to_record(open_config, manifest)["encoder"]["mean"] == list(found.mean)


def test_a_mixture_has_the_mean_of_what_its_sources_give(tmp_path: Path) -> None:
    a, b = dominoes(tmp_path / "a", correlation=1.0), dominoes(tmp_path / "b", digit="below")
    mixture = MixtureManifest.of({"a": a, "b": b}, (1.0, 1.0), probed="a")
    assert mixture.batch_shape == (3, 64, 32)
    expected = [(first + second) / 2 for first, second in zip(a.batch_mean, b.batch_mean, strict=True)]
    assert mixture.batch_mean == pytest.approx(expected)


def test_datasets_of_different_shapes_in_a_batch_are_refused(tmp_path: Path) -> None:
    tall, square = dominoes(tmp_path / "tall"), dominoes(tmp_path / "square", join="square")
    config = debug.image()
    assert tall.input_shape == square.input_shape
    with pytest.raises(UserError, match=r"differ in input shape \(\(3, 64, 32\) and \(3, 32, 32\)\)"):
        check_manifests(config, Manifests(train=tall, test=square))


def test_bits_survive_a_crop() -> None:
    pictures = torch.randint(0, 256, (200, 1, 28, 28), dtype=torch.uint8)
    keys = DrawKeys(seed=0, epoch=0, index_B=torch.arange(200), view=0)
    with_bits = Bits(bits=2)(pictures, keys).inputs.float() / 255
    crop_only = ExpertImageConfig(
        area=(0.5, 1.0), jitter_probability=0, grayscale_probability=0, blur_probability=0, flip_probability=0
    )
    views = ExpertImage(crop_only)(with_bits, keys)
    torch.testing.assert_close(views[:, 1:], with_bits[:, 1:], rtol=0, atol=1e-6)
    assert not torch.equal(views[:, 0], with_bits[:, 0])
