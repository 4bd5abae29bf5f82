from __future__ import annotations

import pytest
import torch
import torchvision
from pydantic import TypeAdapter, ValidationError
from torch import nn

from trainer.models import EncoderConfig, ResNet10Config, ResNet18SmallConfig, build_encoder
from trainer.models.batch_norm import SynchronizedBatchNorm2d

SMALL = ResNet10Config(width=4)


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_numbers_of_parameters() -> None:
    encoder = build_encoder(ResNet18SmallConfig())
    assert (num_parameters(encoder.trunk), num_parameters(encoder)) == (11_168_832, 11_234_496)
    assert num_parameters(build_encoder(ResNet18SmallConfig(head="mlp")).head) == 328_320
    assert num_parameters(build_encoder(ResNet10Config())) == 324_048
    assert num_parameters(build_encoder(ResNet10Config(embedding_size=7)).head) == 129 * 7


@pytest.mark.parametrize("training", [True, False])
def test_resnet18_is_torchvisions_with_another_stem(training: bool) -> None:
    peer = torchvision.models.resnet18()
    peer.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    peer.maxpool = nn.Identity()
    peer.fc = nn.Identity()
    encoder = build_encoder(ResNet18SmallConfig())
    assert list(encoder.trunk.state_dict()) == list(peer.state_dict())
    peer.load_state_dict(encoder.trunk.state_dict())
    views_BCHW = torch.rand(2, 3, 16, 16)
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in ((0.491, 0.482, 0.446), (0.247, 0.243, 0.261)))
    peer.train(training)
    encoder.train(training)
    expected_BC = peer((views_BCHW - mean) / std)
    torch.testing.assert_close(encoder.pooled(views_BCHW), expected_BC)
    peer.load_state_dict(encoder.trunk.state_dict())
    torch.testing.assert_close(encoder(views_BCHW), encoder.head(peer((views_BCHW - mean) / std)))


def test_weights_are_drawn_as_torchvision_draws_them() -> None:
    ours = build_encoder(ResNet18SmallConfig()).trunk.state_dict()
    theirs = torchvision.models.resnet18().state_dict()
    for name, value in ours.items():
        if name.endswith("weight") and value.numel() > 30_000:
            assert value.std().item() == pytest.approx(theirs[name].std().item(), rel=0.03), name
        elif name != "conv1.weight" and value.dim() < 2:
            assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize(("height", "width"), [(32, 32), (28, 28), (33, 17), (8, 64)])
def test_sizes_of_features(height: int, width: int) -> None:
    encoder = build_encoder(SMALL).eval()
    views_BCHW = torch.rand(2, 3, height, width)
    assert encoder.features(views_BCHW).shape == (2, encoder.feature_size(height, width))
    assert encoder.pooled(views_BCHW).shape == (2, encoder.pooled_size)
    assert encoder(views_BCHW).shape == (2, 128)


def test_feature_size_of_resnet18() -> None:
    encoder = build_encoder(ResNet18SmallConfig())
    assert (encoder.feature_size(32, 32), encoder.pooled_size) == (8192, 512)


def test_features_are_the_map_whose_mean_is_pooled_in_either_memory_format() -> None:
    encoder = build_encoder(SMALL).eval()
    views_BCHW = torch.rand(2, 3, 24, 24)
    features_BF = encoder.features(views_BCHW)
    assert features_BF.min() == 0
    torch.testing.assert_close(features_BF.reshape(2, 32, 9).mean(2), encoder.pooled(views_BCHW))
    encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    channels_last_BF = encoder.features(views_BCHW.to(memory_format=torch.channels_last))
    torch.testing.assert_close(channels_last_BF, features_BF, rtol=1e-4, atol=1e-5)


def test_under_autocast_only_the_trunk_is_in_bfloat16() -> None:
    encoder = build_encoder(SMALL).eval()
    seen: list[torch.dtype] = []
    encoder.trunk.register_forward_hook(lambda module, inputs, output: seen.extend([inputs[0].dtype, output.dtype]))
    views_BCHW = torch.rand(2, 3, 16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = [call(views_BCHW.bfloat16()) for call in (encoder, encoder.features, encoder.pooled)]
        pooled_BC = encoder.pooled(views_BCHW)
        embeddings_BD = encoder(views_BCHW)
    assert [output.dtype for output in outputs] == [torch.float32] * 3
    assert set(zip(seen[::2], seen[1::2], strict=True)) == {(torch.float32, torch.bfloat16)}
    assert torch.equal(embeddings_BD, encoder.head(pooled_BC))


def test_normalisation_is_of_the_config_and_not_of_the_checkpoint() -> None:
    config = ResNet10Config(width=4, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    encoder = build_encoder(config).eval()
    neutral = build_encoder(config.model_copy(update={"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)})).eval()
    neutral.load_state_dict(encoder.state_dict())
    views_BCHW = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(encoder(views_BCHW), neutral((views_BCHW - 0.5) * 4))


def test_config_chooses_encoder_and_batch_norm() -> None:
    adapter: TypeAdapter[ResNet18SmallConfig | ResNet10Config] = TypeAdapter(EncoderConfig)
    for batch_norm, expected in [("synchronized", SynchronizedBatchNorm2d), ("local", nn.BatchNorm2d)]:
        config = adapter.validate_python({"kind": "resnet10", "width": 4, "batch_norm": batch_norm})
        norms = [module for module in build_encoder(config).modules() if isinstance(module, nn.BatchNorm2d)]
        assert {type(norm) for norm in norms} == {expected}
        assert len(norms) == 12
    for wrong in ({"kind": "resnet11"}, {"kind": "resnet10", "width": 0}, {"kind": "resnet10", "std": (0.2, 0.2, 0)}):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)
