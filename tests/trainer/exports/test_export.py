"""Exports: other libraries load them and compute the same bits, and a stranger's file runs no code."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import torchvision
from torch import Tensor, nn

from configs import debug
from configs.base import CIFAR10_MEAN, CIFAR10_STD
from data_pipeline.core.errors import UserError
from trainer import load_encoder
from trainer.checkpoint.save import CheckpointWriter
from trainer.config import RunConfig
from trainer.distributed.engines.ddp_engine import DDPEngine
from trainer.exports.encoder import save_encoder
from trainer.models import Encoder, ResNetConfig, build_encoder
from trainer.modules import build_modules
from trainer.optim.optimizers import SGDConfig
from trainer.pretrained import HEADER_KEY
from trainer.run_dir import RunDir, write_json

CIFAR10: dict[str, Any] = {"mean": CIFAR10_MEAN, "std": CIFAR10_STD}
TINY = ResNetConfig(kind="resnet10", width=4, embedding_size=16, **CIFAR10)


def make_run(directory: Path, *, steps: tuple[int, ...]) -> RunDir:
    """Make a run whose checkpoints differ from the first weights and each other, also in batch norm statistics."""
    config = RunConfig.model_validate(
        debug.image().model_dump() | {"encoder": TINY, "optimizer": SGDConfig(momentum=0.0), "name": "tiny-run"}
    )
    run_dir = RunDir(directory)
    write_json(run_dir.config, config.model_dump(mode="json"))
    engine = DDPEngine(build_modules(config).encoder.train(), optimizer=config.optimizer)
    draw = torch.Generator().manual_seed(0)
    with CheckpointWriter(run_dir, keep=len(steps)) as writer:
        for step in steps:
            engine.backward(engine(torch.rand(2, 3, 32, 32, generator=draw)).square().sum())
            engine.step(learning_rate=1e-3)
            writer.save(step, engines={"encoder": engine}, objective_state={})
    return run_dir


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("run"), steps=(5, 10))


@pytest.fixture
def exported(run_dir: RunDir, tmp_path: Path) -> Path:
    save_encoder(run_dir, tmp_path / "encoder.safetensors")
    return tmp_path / "encoder.safetensors"


def read_header(path: Path) -> dict[str, Any]:
    with safetensors.safe_open(path, "pt") as file:
        header: dict[str, Any] = json.loads(file.metadata()[HEADER_KEY])
    return header


def write_export(path: Path, header: object, weights: dict[str, Tensor]) -> Path:
    text = header if isinstance(header, str) else json.dumps(header)
    safetensors.torch.save_file(weights, path, metadata={HEADER_KEY: text})
    return path


def pictures(num_channels: int) -> Tensor:
    return torch.rand(3, num_channels, 32, 32, generator=torch.Generator().manual_seed(1))


def normalise(pictures_BCHW: Tensor, header: dict[str, Any]) -> Tensor:
    mean, std = (torch.tensor(header["encoder"][name]).reshape(-1, 1, 1) for name in ("mean", "std"))
    return (pictures_BCHW - mean) / std


def own_encoder(config: Any = TINY) -> Encoder:
    """An encoder from somebody's own loop, whose batch norm has moved."""
    torch.manual_seed(3)
    encoder = build_encoder(config).train()
    with torch.no_grad():
        encoder(pictures(config.in_channels))
    return encoder.eval()


def features_of(encoder: Encoder, num_channels: int) -> Tensor:
    with torch.no_grad():
        return encoder.pooled(pictures(num_channels))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["small", "standard, one channel, no ReLU in the stem"])
def test_torchvisions_resnet18_computes_the_same_bits(form: str, tmp_path: Path) -> None:
    model = torchvision.models.resnet18()
    model.fc = nn.Identity()
    if form == "small":
        config: Any = ResNetConfig(kind="resnet18_small", **CIFAR10)
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    else:
        config = ResNetConfig(kind="resnet18", in_channels=1, mean=(0.2,), std=(0.3,), stem_relu=False)
        model.conv1 = nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)
        model.relu = nn.Identity()
    encoder = own_encoder(config)
    out = tmp_path / "encoder.safetensors"
    save_encoder(encoder, out)

    model.load_state_dict(safetensors.torch.load_file(out))
    with torch.no_grad():
        theirs = model.eval()(normalise(pictures(config.in_channels), read_header(out)))
    assert torch.equal(theirs, features_of(encoder, config.in_channels))
    assert torch.equal(theirs, features_of(load_encoder(out), config.in_channels))


def test_the_chosen_step_is_exported_and_the_newest_if_none_is_chosen(run_dir: RunDir, tmp_path: Path) -> None:
    features = []
    for step in (0, 5, 10):
        save_encoder(run_dir, tmp_path / "encoder.safetensors", step=step)  # over the one before
        assert read_header(tmp_path / "encoder.safetensors")["step"] == step
        encoder = load_encoder(tmp_path / "encoder.safetensors")
        assert not encoder.training
        assert torch.equal(features_of(encoder, 3), features_of(load_encoder(run_dir.path, step=step), 3))
        features.append(features_of(encoder, 3))
    assert not torch.equal(features[0], features[1])
    assert not torch.equal(features[1], features[2])
    save_encoder(run_dir, tmp_path / "newest.safetensors")
    assert (tmp_path / "newest.safetensors").read_bytes() == (tmp_path / "encoder.safetensors").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"encoder.safetensors", "newest.safetensors"}


def test_the_header_says_where_the_weights_come_from(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", steps=(5, 10))
    out = tmp_path / "new" / "encoder.safetensors"
    save_encoder(run_dir, out)
    assert read_header(out)["git_commit"] is None
    starts = [{"start_step": step, "git_commit": commit} for step, commit in ((0, "aaa"), (5, "bbb"), (10, "ccc"))]
    write_json(run_dir.provenance, {"git_commit": "aaa", "starts": starts})
    for step, commit in ((5, "aaa"), (10, "bbb")):
        save_encoder(run_dir, out, step=step)
        assert read_header(out) == {
            "version": 1,
            "run": "tiny-run",
            "step": step,
            "git_commit": commit,
            "encoder": TINY.model_dump(mode="json"),
        }


def test_an_export_leaves_the_ambient_random_state_alone_and_has_no_embeddings(exported: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    encoder = load_encoder(exported)
    assert torch.equal(torch.rand(3), expected)
    with pytest.raises(UserError, match="no head"):
        encoder(pictures(3))


class CreatesAFile:
    """An object whose pickle creates the file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_a_pickle_by_the_name_of_an_export_is_refused_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "encoder.safetensors"
    torch.save(CreatesAFile(tmp_path / "ran"), path)
    with pytest.raises(UserError, match="is not an encoder that"):
        load_encoder(path)
    assert not (tmp_path / "ran").exists()
    torch.load(io.BytesIO(path.read_bytes()), weights_only=False)
    assert (tmp_path / "ran").exists()  # so it was armed


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def with_damaged_header(path: Path) -> None:
    write_export(path, "no JSON", {"x": torch.zeros(1)})


@pytest.mark.parametrize("damage", [cut_short, with_damaged_header, Path.unlink])
def test_other_files_are_no_export(damage: Callable[[Path], None], exported: Path) -> None:
    damage(exported)
    with pytest.raises(UserError, match=r"encoder\.safetensors is not an encoder that python -m trainer\.export wrote"):
        load_encoder(exported)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "the header of .*version"),
        ({"encoder": {"kind": "resnet11"}}, "the header of .*encoder"),
        ({"encoder": TINY.model_dump(mode="json") | {"width": 8}}, 'does not hold the "resnet10"'),
        ({"code": "import os"}, 'unknown key "code"'),
    ],
)
def test_a_header_that_does_not_fit_is_refused(change: dict[str, Any], message: str, exported: Path) -> None:
    changed = write_export(exported, read_header(exported) | change, safetensors.torch.load(exported.read_bytes()))
    with pytest.raises(UserError, match=message) as refusal:
        load_encoder(changed)
    assert "\n" not in str(refusal.value)
