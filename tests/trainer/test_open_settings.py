"""What a config leaves open, the train set decides, and the run records: mean and std, and the form of the network."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from data_pipeline.storage.manifest import Manifest, load_manifest
from tests.photos import build_photos
from tests.tiny_data import on_data, write_tiny_pair
from trainer import load_encoder
from trainer.config import RunConfig
from trainer.exports.encoder import save_encoder
from trainer.models import Encoder, Normalization, ResNetConfig, build_encoder
from trainer.modules import build_modules
from trainer.open_settings import normalization_of
from trainer.pretrained import load_modules
from trainer.run_dir import RunDir
from trainer.train import train

CPU = torch.device("cpu")
OF_THE_DATA = ["encoder.mean=null", "encoder.std=null"]
ONLINE = "data.overlay=online"


def configure(data: Path, *settings: str) -> RunConfig:
    small = ["global_batch_size=16", "num_epochs=1", "watchdog.enabled=false", "precision=float64"]
    return resolve_recipe("debug:image", on_data(data, *small, *settings))


def start(data: Path, run_dir: Path, *settings: str) -> RunDir:
    train(configure(data, *settings), RunDir(run_dir), device=CPU, command="train")
    return RunDir(run_dir)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=48, num_test=16)


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return start(data, tmp_path_factory.mktemp("runs") / "run", *OF_THE_DATA)


def numbers_of(encoder: Encoder) -> tuple[list[float], list[float]]:
    return encoder.mean_C11.flatten().tolist(), encoder.std_C11.flatten().tolist()


def views() -> Tensor:
    return torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def manifest_of(data: Path) -> Manifest:
    return load_manifest(data / "train")


def test_a_run_that_has_not_begun_has_lost_nothing(trained: RunDir, tmp_path: Path) -> None:
    """Its config must not be edited: its job may wait in the queue."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    shutil.copy(trained.config, run_dir.config)
    with pytest.raises(UserError, match=r"/run has not begun to train yet; `python launch/status\.py .*/run` says why"):
        load_modules(run_dir, step=0)


BY_SIZE = ["encoder={kind: resnet18_by_size, embedding_size: 8}"]


@pytest.mark.slow
def test_a_network_has_form_and_normalisation_of_its_train_set_and_needs_it_no_more_once_it_is_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run directory is enough to load the encoder at every step, also untrained, and to export it."""
    size, kind = 64, "resnet18"
    data = build_photos(tmp_path / "photos", size=size, num_train=8, num_test=8)
    with caplog.at_level(logging.INFO):
        run_dir = start(data, tmp_path / "run", *BY_SIZE, "global_batch_size=8", "precision=float32", ONLINE)
    assert f"encoder.kind=resnet18_by_size is {kind} for inputs of {size}x{size}" in caplog.text
    asked, manifest = json.loads(run_dir.config.read_text())["encoder"], manifest_of(data)
    assert (asked["kind"], asked["mean"]) == ("resnet18_by_size", None)
    assert json.loads(run_dir.provenance.read_text())["encoder_input_size"] == [size, size]
    shutil.rmtree(data)
    by_hand = build_encoder(ResNetConfig(kind=kind, embedding_size=8))
    for step in (0, None):
        encoder = load_encoder(run_dir.path, step=step)
        assert encoder.state_dict().keys() == by_hand.state_dict().keys()
        for name, value in encoder.state_dict().items():
            assert value.shape == by_hand.state_dict()[name].shape, name
        for ours, expected in zip(numbers_of(encoder), (manifest.batch_mean, manifest.batch_std), strict=True):
            assert ours == pytest.approx(expected)
    save_encoder(run_dir, tmp_path / "encoder.safetensors")
    x = torch.rand(2, 3, size, size)
    assert torch.equal(load_encoder(tmp_path / "encoder.safetensors").pooled(x), load_encoder(run_dir.path).pooled(x))


@pytest.mark.parametrize(
    ("size", "kind"), [(32, "resnet34_small"), (63, "resnet34_small"), (64, "resnet34"), (224, "resnet34")]
)
def test_the_standard_form_begins_at_64_pixels(size: int, kind: str) -> None:
    config = ResNetConfig(kind="resnet34_by_size")
    decided = config.with_form(height=224, width=size)
    assert isinstance(decided, ResNetConfig)
    assert (decided.kind, decided.init) == (kind, "torchvision")
    assert decided.with_form(height=32, width=32) == decided
    with pytest.raises(ValueError, match="depends on the size of its inputs; call with_form first"):
        build_encoder(config)


def test_spectrograms_come_normalised() -> None:
    config = resolve_recipe("debug:audio", OF_THE_DATA)
    assert numbers_of(build_modules(config).encoder) == ([0.0], [1.0])


def test_a_channel_that_never_changes_is_divided_by_one(data: Path) -> None:
    manifest = manifest_of(data).model_copy(update={"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.0, 0.5)})
    assert normalization_of(manifest) == Normalization(mean=(0.1, 0.2, 0.3), std=(0.4, 1.0, 0.5))
