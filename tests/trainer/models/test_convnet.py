"""The small convolutional network is that of the RandBit experiment, which was run in Keras."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from data_pipeline.core.errors import UserError
from trainer.models import ConvNetConfig, Encoder, HeadConfig, build_encoder
from trainer.models.encoder import check_input_size

HEAD = HeadConfig(hidden_sizes=(256,), batch_norm=True, bias=False, defaults="keras")
NUM_BITS = 10


def published(**settings: Any) -> ConvNetConfig:
    """Return the network of the notebook, for a digit with 10 bits."""
    num = 1 + NUM_BITS
    values = {"in_channels": num, "mean": (0.0,) * num, "std": (1.0,) * num, "embedding_size": 64, "head": HEAD}
    return ConvNetConfig.parse(values | {"image_size": (28, 28)} | settings, where="encoder")


def build(config: ConvNetConfig) -> Encoder:
    torch.manual_seed(0)
    return build_encoder(config)


def by_hand(encoder: Encoder, views_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return features and embeddings in training mode, from the weights in their order."""
    weights = [parameter for parameter in encoder.parameters() if parameter.dim() > 1]

    def norm_relu(x: Tensor) -> Tensor:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
        return ((x - mean) / (variance + 1e-3).sqrt()).relu()

    x = views_BCHW
    for weight in weights[:3]:
        x = norm_relu(F.conv2d(x, weight, stride=2))
    features = norm_relu(x.flatten(1) @ weights[3].T)
    return features, norm_relu(features @ weights[4].T) @ weights[5].T


@pytest.mark.parametrize("size", [(28, 28), (21, 16)])
def test_the_network_is_the_published_one(size: tuple[int, int]) -> None:
    encoder = build(published(image_size=size)).double()
    views_BCHW = torch.rand(6, 1 + NUM_BITS, *size, dtype=torch.float64)
    features, embeddings = by_hand(encoder, views_BCHW)
    torch.testing.assert_close(encoder.features(views_BCHW), features)
    torch.testing.assert_close(encoder.pooled(views_BCHW), features)
    torch.testing.assert_close(encoder(views_BCHW), embeddings)
    assert encoder.feature_size(*size) == encoder.pooled_size == 128


@pytest.mark.parametrize("batch_norm", ["synchronized", "local", "split"])
def test_every_batch_norm_keeps_the_numbers_of_keras(batch_norm: str) -> None:
    encoder = build(published(batch_norm=batch_norm))
    norms = [module for module in encoder.modules() if isinstance(module, _BatchNorm)]
    assert {(norm.eps, norm.momentum) for norm in norms} == {(1e-3, 0.01)}
    assert len({type(norm) for norm in norms[:-1]}) == 1


def test_the_first_weights_are_those_of_keras() -> None:
    fans = [(99, 9 * 32), (9 * 32, 9 * 64), (9 * 64, 9 * 64), (256, 128), (128, 256), (256, 64)]
    weights = [parameter for parameter in build(published()).parameters() if parameter.dim() > 1]
    for weight, (fan_in, fan_out) in zip(weights, fans, strict=True):
        bound = (6 / (fan_in + fan_out)) ** 0.5
        assert 0.99 * bound < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)


def test_the_size_of_the_data_decides_an_open_size() -> None:
    config = published(image_size=None)
    decided = config.with_form(height=32, width=20)
    assert decided == published(image_size=(32, 20))
    assert decided.with_form(height=28, width=28) == decided
    with pytest.raises(ValueError, match="depends on the size of its inputs; call with_form first"):
        build(config)
    check_input_size(config, height=32, width=20)


def test_other_sizes_are_one_sentence() -> None:
    with pytest.raises(UserError, match=r"^the encoder cannot take inputs of 32 x 28: its dense layer is for 28 x 28 "):
        check_input_size(published(), height=32, width=28)
    with pytest.raises(UserError, match="the 3 convolutions of a convnet leave no pixel of 8 x 28; use larger pict"):
        check_input_size(published(image_size=None), height=8, width=28)
    with pytest.raises(UserError, match="the encoder cannot take inputs of 8 x 8: "):
        check_input_size(published(dense_size=None), height=8, width=8)


def test_without_a_dense_layer_the_head_reads_the_mean_of_the_map() -> None:
    encoder = build(published(dense_size=None, image_size=None))
    assert (encoder.feature_size(28, 28), encoder.pooled_size) == (2 * 2 * 64, 64)
    assert encoder(torch.rand(4, 1 + NUM_BITS, 32, 32)).shape == (4, 64)
