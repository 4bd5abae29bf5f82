from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from data_pipeline.core.errors import UserError
from trainer.models import Normalization, TimmConfig, build_encoder
from trainer.models.batch_norm import SynchronizedBatchNorm2d
from trainer.models.timm_trunk import TimmTrunk

timm = pytest.importorskip("timm")

CIFAR10 = Normalization(mean=(0.491, 0.482, 0.446), std=(0.247, 0.243, 0.261))
VIT = TimmConfig(name="test_vit", options={"img_size": 32, "patch_size": 8})


def test_a_vision_transformer_is_timms_and_learns_throughout() -> None:
    torch.manual_seed(0)
    encoder = build_encoder(VIT, normalization=CIFAR10)
    peer = timm.create_model("test_vit", num_classes=0, img_size=32, patch_size=8)
    assert isinstance(encoder.trunk, TimmTrunk)
    peer.load_state_dict(encoder.trunk.model.state_dict())
    views_BCHW = torch.rand(2, 3, 32, 32)
    normalised_BCHW = (views_BCHW - encoder.mean_C11) / encoder.std_C11
    torch.testing.assert_close(encoder.pooled(views_BCHW), peer(normalised_BCHW))
    assert torch.equal(encoder.features(views_BCHW), encoder.pooled(views_BCHW))
    assert encoder(views_BCHW).shape == (2, 128)
    encoder(views_BCHW).square().sum().backward()
    assert not [name for name, parameter in encoder.named_parameters() if parameter.grad is None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("test_vit", {"img_size": 32, "patch_size": 8}, 17 * 64),
        ("mobilenetv3_small_050", {}, 288),  # its pooled vector is wider than its map
    ],
)
def test_maps_of_tokens_and_of_pixels(name: str, options: dict[str, Any], size: int) -> None:
    views_BCHW = torch.rand(2, 1, 32, 32)
    channels: dict[str, Any] = {"in_channels": 1, "mean": (0,), "std": (1,)}
    config = TimmConfig(name=name, options=options, probe_reads="map", **channels)
    encoder = build_encoder(config, normalization=CIFAR10).eval()
    assert encoder.features(views_BCHW).shape == (2, encoder.feature_size(32, 32)) == (2, size)
    assert encoder.pooled(views_BCHW).shape == (2, encoder.pooled_size)
    assert encoder(views_BCHW).shape == (2, 128)
    pooled = build_encoder(config.model_copy(update={"probe_reads": "pooled"}), normalization=CIFAR10).eval()
    assert pooled.features(views_BCHW).shape == (2, pooled.feature_size(32, 32)) == (2, encoder.pooled_size)


@pytest.mark.slow
def test_batch_norms_with_an_activation_keep_their_names_and_results() -> None:
    torch.manual_seed(0)
    local = build_encoder(TimmConfig(name="test_efficientnet", batch_norm="local"), normalization=CIFAR10)
    ours = build_encoder(TimmConfig(name="test_efficientnet"), normalization=CIFAR10)
    assert not any(isinstance(module, SynchronizedBatchNorm2d) for module in local.modules())
    norms = [module for module in ours.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert all(isinstance(norm, SynchronizedBatchNorm2d) for norm in norms)
    ours.load_state_dict(local.state_dict())
    views_BCHW = torch.rand(3, 3, 32, 32)
    assert torch.equal(ours(views_BCHW), local(views_BCHW))
    assert all(torch.equal(value, local.state_dict()[name]) for name, value in ours.state_dict().items())
    assert torch.equal(ours.eval()(views_BCHW), local.eval()(views_BCHW))


def test_a_size_that_the_model_refuses() -> None:
    with pytest.raises(UserError, match="num_classes cannot be set here"):
        TimmConfig.parse({"name": "test_vit", "options": {"num_classes": 3}}, where="encoder")
    with pytest.raises(UserError, match=r'timm cannot build "test_vitt" with options \(\): Unknown model'):
        build_encoder(TimmConfig(name="test_vitt"), normalization=CIFAR10)
    options: dict[str, Any] = {"img_size": 32, "depth": 1, "embed_dim": 12}
    encoder = build_encoder(TimmConfig(name="vit_tiny_patch16_224", options=options), normalization=CIFAR10)
    assert encoder.feature_size(32, 32) == 12
    with pytest.raises(UserError, match=r"the encoder cannot take inputs of 64 x 64: Input height \(64\)"):
        encoder.feature_size(64, 64)


def test_batch_norms_that_cannot_be_synchronised() -> None:
    with pytest.raises(UserError, match="batch norm of type BatchNorm1d cannot be synchronised; set encoder"):
        build_encoder(TimmConfig(name="levit_128s"), normalization=CIFAR10)
    build_encoder(TimmConfig(name="levit_128s", batch_norm="local"), normalization=CIFAR10)
