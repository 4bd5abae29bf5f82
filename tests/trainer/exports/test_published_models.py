"""Weights go to torchvision and timm and come back, with equal features both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from configs.base import CIFAR10_MEAN, CIFAR10_STD
from data_pipeline.core.errors import UserError
from trainer.exports.published_models import load_published, to_timm, to_torchvision
from trainer.models import Encoder, ResNetConfig, TimmConfig, WideResNet34x5Config, build_encoder

NORMALIZATION: dict[str, Any] = {"mean": CIFAR10_MEAN, "std": CIFAR10_STD}
SMALL_VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 2}


def trained(config: Any, *, seed: int = 0) -> Encoder:
    """An encoder whose batch norm statistics are not those of the beginning."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = build_encoder(config).train()
        with torch.no_grad():
            encoder(torch.rand(4, config.in_channels, 32, 32))
    return encoder.eval()


def pictures(num_channels: int = 3) -> Tensor:
    return torch.rand(3, num_channels, 32, 32, generator=torch.Generator().manual_seed(1))


def of_their_model(model: nn.Module, encoder: Encoder, pictures_BCHW: Tensor) -> Tensor:
    with torch.no_grad():
        features: Tensor = model((pictures_BCHW - encoder.mean_C11) / encoder.std_C11)
    return features


def pooled(encoder: Encoder, pictures_BCHW: Tensor) -> Tensor:
    with torch.no_grad():
        return encoder.pooled(pictures_BCHW)


@pytest.mark.parametrize(
    "config",
    [
        ResNetConfig(kind="resnet18_small", **NORMALIZATION),
        ResNetConfig(kind="resnet18", in_channels=1, mean=(0.2,), std=(0.3,), stem_relu=False),
        ResNetConfig(kind="resnet10", width=64, **NORMALIZATION),
        pytest.param(ResNetConfig(kind="resnet50", **NORMALIZATION), marks=pytest.mark.slow),
    ],
    ids=lambda config: config.kind,
)
def test_torchvision_takes_the_weights_and_gives_them_back(config: ResNetConfig) -> None:
    encoder, other = trained(config), trained(config, seed=1)
    state = torch.get_rng_state()
    model = to_torchvision(encoder)
    assert torch.equal(state, torch.get_rng_state())
    assert isinstance(model, torchvision.models.ResNet)
    assert not model.training
    x = pictures(config.in_channels)
    assert torch.equal(of_their_model(model, encoder, x), pooled(encoder, x))

    head = [parameter.clone() for parameter in other.head.parameters()]
    load_published(other, model.state_dict())
    assert torch.equal(pooled(other, x), pooled(encoder, x))
    assert all(torch.equal(a, b) for a, b in zip(head, other.head.parameters(), strict=True))


def test_a_wrapped_encoder_goes_to_torchvision_and_back() -> None:
    encoder, other = (trained(ResNetConfig(kind="resnet10", width=64, **NORMALIZATION), seed=seed) for seed in (0, 1))
    model = to_torchvision(nn.DataParallel(encoder))
    assert torch.equal(of_their_model(model, encoder, pictures()), pooled(encoder, pictures()))
    load_published(nn.DataParallel(other), model.state_dict())
    assert torch.equal(pooled(other, pictures()), pooled(encoder, pictures()))


def test_a_model_of_torchvision_with_its_classifier_becomes_an_encoder() -> None:
    model = torchvision.models.resnet18().eval()
    encoder = build_encoder(ResNetConfig(kind="resnet18", **NORMALIZATION)).eval()
    load_published(encoder, model.state_dict())
    model.fc = nn.Identity()
    assert torch.equal(of_their_model(model, encoder, pictures()), pooled(encoder, pictures()))


@pytest.mark.parametrize("prefix", ["", "module."])
def test_weights_of_old_torch_and_of_data_parallel_are_taken(prefix: str) -> None:
    model = torchvision.models.resnet18().eval()
    encoder = build_encoder(ResNetConfig(kind="resnet18", **NORMALIZATION)).eval()
    weights = {prefix + name: x for name, x in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    load_published(encoder, weights)
    model.fc = nn.Identity()
    assert torch.equal(of_their_model(model, encoder, pictures()), pooled(encoder, pictures()))
    with pytest.raises(UserError, match=r"bn1\.running_mean is missing"):
        load_published(encoder, {name: x for name, x in weights.items() if name != f"{prefix}bn1.running_mean"})
    with pytest.raises(UserError, match="has no place in the encoder"):
        load_published(encoder, weights | {"module.module.conv1.weight": torch.zeros(1)})


@pytest.mark.parametrize(
    "config",
    [
        ResNetConfig(kind="resnet18", **NORMALIZATION),
        TimmConfig(name="vit_tiny_patch16_224", options=SMALL_VIT, **NORMALIZATION),
        TimmConfig(name="resnet10t", **NORMALIZATION),
    ],
    ids=lambda config: getattr(config, "name", config.kind),
)
def test_timm_takes_the_weights_and_gives_them_back(config: Any) -> None:
    pytest.importorskip("timm")
    encoder, other = trained(config), trained(config, seed=1)
    model = to_timm(encoder)
    torch.testing.assert_close(of_their_model(model, encoder, pictures()), pooled(encoder, pictures()))
    load_published(other, model.state_dict())
    assert torch.equal(pooled(other, pictures()), pooled(encoder, pictures()))


@pytest.mark.parametrize(
    ("config", "function", "message"),
    [
        (ResNetConfig(kind="resnet10", **NORMALIZATION), to_torchvision, "no network like resnet10"),
        (ResNetConfig(kind="resnet18_small", **NORMALIZATION), to_timm, "timm has no network like resnet18_small"),
        (WideResNet34x5Config(**NORMALIZATION), to_torchvision, "no network like wrn_34_5"),
    ],
)
def test_a_network_that_they_do_not_have_is_refused(config: Any, function: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        function(build_encoder(config))


def test_weights_of_another_network_are_refused_and_change_nothing() -> None:
    encoder = trained(ResNetConfig(kind="resnet18_small", **NORMALIZATION))
    before = pooled(encoder, pictures())
    with pytest.raises(UserError, match=r"conv1\.weight has shape \(64, 3, 7, 7\) in place of \(64, 3, 3, 3\)"):
        load_published(encoder, torchvision.models.resnet18().state_dict())
    with pytest.raises(UserError, match="is missing"):
        load_published(encoder, {})
    assert torch.equal(pooled(encoder, pictures()), before)
