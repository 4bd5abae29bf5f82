"""Encoders take weights of torchvision and timm, with equal features."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from configs.base import CIFAR10_MEAN, CIFAR10_STD
from trainer import load_published
from trainer.models import Encoder, ResNetConfig, TimmConfig, build_encoder

NORMALIZATION: dict[str, Any] = {"mean": CIFAR10_MEAN, "std": CIFAR10_STD}
SMALL_VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 2}


def assert_equal_features(model: nn.Module, encoder: Encoder) -> None:
    pictures_BCHW = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs: Tensor = model.eval()((pictures_BCHW - encoder.mean_C11) / encoder.std_C11)
        torch.testing.assert_close(encoder.eval().pooled(pictures_BCHW), theirs)


def test_a_model_of_torchvision_with_its_classifier_becomes_an_encoder() -> None:
    """Both are in DataParallel, and the weights are as torch before 1.0 wrote them."""
    model = torchvision.models.resnet18()
    model.train()(torch.rand(4, 3, 32, 32))  # moves the statistics of batch norm
    weights = nn.DataParallel(model).state_dict()
    weights = {name: x for name, x in weights.items() if not name.endswith("num_batches_tracked")}
    encoder = build_encoder(ResNetConfig(kind="resnet18", **NORMALIZATION))
    head = [parameter.clone() for parameter in encoder.head.parameters()]
    load_published(nn.DataParallel(encoder), weights)
    model.fc = nn.Identity()
    assert_equal_features(model, encoder)
    assert all(map(torch.equal, head, encoder.head.parameters()))


@pytest.mark.parametrize(("name", "options"), [("vit_tiny_patch16_224", SMALL_VIT), ("resnet10t", {})])
def test_a_model_of_timm_becomes_an_encoder(name: str, options: dict[str, Any]) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, **options)
    encoder = build_encoder(TimmConfig(name=name, options=options, **NORMALIZATION))
    load_published(encoder, model.state_dict())
    model.reset_classifier(0)
    assert_equal_features(model, encoder)
