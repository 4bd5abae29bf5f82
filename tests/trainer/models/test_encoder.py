from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torchvision
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.nn import functional as F

from data_pipeline.core.errors import UserError
from trainer.models import (
    Encoder,
    EncoderConfig,
    Normalization,
    ResNetConfig,
    WideResNet34x5Config,
    build_encoder,
)
from trainer.models.encoder import BaseEncoderConfig
from trainer.models.resnet import wide_resnet_trunk
from trainer.models.trunk import Trunk

CIFAR10 = Normalization(mean=(0.491, 0.482, 0.446), std=(0.247, 0.243, 0.261))
SMALL = ResNetConfig(kind="resnet10", width=4)
SPECTROGRAM: dict[str, Any] = {"in_channels": 1, "mean": (0.0,), "std": (1.0,)}
CONFIGS: TypeAdapter[EncoderConfig] = TypeAdapter(EncoderConfig)


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def torchvisions(kind: str) -> Any:
    """Return torchvision's network without values, its stem changed by hand if `kind` is of the small form."""
    name, _, form = kind.partition("_")
    with torch.device("meta"):
        peer = getattr(torchvision.models, name)()
        peer.fc = nn.Identity()
        if form == "small":
            peer.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
            peer.maxpool = nn.Identity()
    return peer


def torchvisions_with_weights(encoder: Encoder, kind: str) -> Any:
    peer = torchvisions(kind).to_empty(device="cpu")
    peer.load_state_dict(encoder.trunk.state_dict())
    return peer


@pytest.mark.parametrize(
    ("config", "in_trunk", "in_all"),
    [
        (ResNetConfig(kind="resnet18_small"), 11_168_832, 11_234_496),
        (ResNetConfig(kind="resnet18", **SPECTROGRAM), 11_170_240, 11_235_904),
        (WideResNet34x5Config(), 11_550_864, 11_550_864 + 321 * 128),
        (ResNetConfig(kind="resnet10"), 324_048 - 129 * 128, 324_048),
    ],
    ids=["resnet18_small", "sound", "wrn_34_5", "resnet10"],
)
def test_numbers_of_parameters(config: EncoderConfig, in_trunk: int, in_all: int) -> None:
    with torch.device("meta"):
        encoder = build_encoder(config, normalization=CIFAR10)
    assert (num_parameters(encoder.trunk), num_parameters(encoder)) == (in_trunk, in_all)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ResNetConfig(kind="resnet18_small"), [-0.0014408393, 0.1032386199, -0.0071888282, 0.0114132930, 0.0010148012]),
        (
            ResNetConfig(kind="resnet10", init="torchvision"),
            [-0.0655433759, -0.0016397752, -0.0086924732, 0.0244700275, -0.0269987658],
        ),
    ],
    ids=["torch", "torchvision"],
)
def test_a_seed_goes_on_meaning_the_same_weights(config: EncoderConfig, expected: list[float]) -> None:
    """Published numbers of ours were trained from these."""
    torch.manual_seed(0)
    state = build_encoder(config, normalization=CIFAR10).state_dict()
    weights = [state[name].flatten() for name in ("trunk.conv1.weight", "trunk.layer4.0.conv2.weight", "head.weight")]
    drawn = torch.cat([weights[0][:2], weights[1][:2], weights[2][:1]])
    torch.testing.assert_close(drawn, torch.tensor(expected), rtol=1e-5, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "training"), [("resnet18_small", True), ("resnet34", False), ("resnet50", False)])
def test_resnets_are_torchvisions(kind: str, training: bool) -> None:
    encoder = build_encoder(CONFIGS.validate_python({"kind": kind}), normalization=CIFAR10)
    peer = torchvisions_with_weights(encoder, kind)
    views_BCHW = torch.rand(2, 3, 36, 36)
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in ((0.491, 0.482, 0.446), (0.247, 0.243, 0.261)))
    peer.train(training)
    encoder.train(training)
    torch.testing.assert_close(encoder.pooled(views_BCHW), peer((views_BCHW - mean) / std))
    peer.load_state_dict(encoder.trunk.state_dict())
    torch.testing.assert_close(encoder(views_BCHW), encoder.head(peer((views_BCHW - mean) / std)))


def assert_law(weight: Tensor, *, std: float, uniform: bool) -> None:
    """Check mean, deviation and range. In units of the deviation no uniform value exceeds sqrt(3)."""
    scaled = weight.flatten().double() / std
    num = scaled.numel()
    assert scaled.mean().item() == pytest.approx(0, abs=5 / num**0.5)
    variance_of_square = 0.8 if uniform else 2
    assert scaled.square().mean().item() == pytest.approx(1, abs=5 * (variance_of_square / num) ** 0.5)
    if uniform:
        assert 1.7 < scaled.abs().max().item() <= 3**0.5 * (1 + 1e-6)
    else:
        assert scaled.abs().max().item() > 2


@pytest.mark.parametrize(
    ("config", "stem_std", "others_uniform"),
    [
        (ResNetConfig(kind="resnet18_small"), 1 / (3 * 27) ** 0.5, True),
        (ResNetConfig(kind="resnet10", width=64), 1 / (3 * 27) ** 0.5, True),
        (ResNetConfig(kind="resnet18"), (2 / (64 * 49)) ** 0.5, False),
        (ResNetConfig(kind="resnet18", **SPECTROGRAM), 1 / (3 * 49) ** 0.5, False),
    ],
    ids=["resnet18_small", "resnet10", "resnet18", "sound"],
)
def test_the_law_of_every_first_weight(config: ResNetConfig, stem_std: float, others_uniform: bool) -> None:
    """The published pictures: torch's law. The published sounds: torchvision's, but for the replaced stem."""
    encoder = build_encoder(config)
    for name, weight in encoder.trunk.named_parameters():
        if weight.dim() == 4:
            num_out, num_in, height, width = weight.shape
            torchs, torchvisions = (3 * num_in * height * width) ** -0.5, (2 / (num_out * height * width)) ** 0.5
            std = stem_std if name == "conv1.weight" else torchs if others_uniform else torchvisions
            assert_law(weight.detach(), std=std, uniform=std == torchs)
        else:
            assert torch.equal(weight, torch.ones_like(weight) * name.endswith("weight")), name
    assert isinstance(encoder.head, nn.Linear)
    torchs = (3 * encoder.head.in_features) ** -0.5
    assert_law(encoder.head.weight.detach(), std=torchs, uniform=True)


@pytest.mark.slow
def test_the_wide_resnet_is_that_of_its_paper() -> None:
    """The forward pass of the published code, which is written with functions of the state."""
    trunk = wide_resnet_trunk(16, 2).eval()
    with torch.no_grad():
        for parameter in trunk.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in trunk.named_buffers():
            if name.endswith(("mean", "var")):
                buffer.add_(torch.rand_like(buffer))
    state = trunk.state_dict()

    def norm_relu(x: Tensor, name: str) -> Tensor:
        weight, bias, mean, var = (state[f"{name}.{key}"] for key in ("weight", "bias", "running_mean", "running_var"))
        scale = weight / (var + 1e-5).sqrt()
        return F.relu(x * scale[:, None, None] + (bias - mean * scale)[:, None, None])

    x = torch.rand(2, 3, 12, 12)
    out = F.conv2d(x, state["conv1.weight"], padding=1)
    for stage in (1, 2, 3):
        for block in (0, 1):
            base, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            first = norm_relu(out, f"{base}.bn1")
            second = norm_relu(F.conv2d(first, state[f"{base}.conv1.weight"], None, stride, 1), f"{base}.bn2")
            shortcut = state.get(f"{base}.shortcut.weight")
            assert (shortcut is not None) == (block == 0)
            out = out if shortcut is None else F.conv2d(first, shortcut, None, stride)
            out = out + F.conv2d(second, state[f"{base}.conv2.weight"], padding=1)
    torch.testing.assert_close(trunk(x), norm_relu(out, "bn1"), rtol=1e-4, atol=1e-4)
    assert trunk.pool(trunk(x)).shape == (2, trunk.num_channels) == (2, 128)


def test_features_are_the_map_whose_mean_is_pooled_in_either_memory_format() -> None:
    encoder = build_encoder(SMALL, normalization=CIFAR10).eval()
    views_BCHW = torch.rand(2, 3, 24, 24)
    features_BF = encoder.features(views_BCHW)
    assert features_BF.min() == 0
    assert features_BF.shape == (2, encoder.feature_size(24, 24))
    torch.testing.assert_close(features_BF.reshape(2, 32, 9).mean(2), encoder.pooled(views_BCHW))
    encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    channels_last_BF = encoder.features(views_BCHW.to(memory_format=torch.channels_last))
    torch.testing.assert_close(channels_last_BF, features_BF, rtol=1e-4, atol=1e-5)


def test_under_autocast_only_the_trunk_is_in_bfloat16() -> None:
    encoder = build_encoder(SMALL, normalization=CIFAR10).eval()
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


def test_one_channel_and_numbers_that_do_not_fit() -> None:
    encoder = build_encoder(
        ResNetConfig(kind="resnet10", width=4, in_channels=1, mean=(-90.293,), std=(11.799,)), normalization=CIFAR10
    ).eval()
    assert encoder(torch.rand(2, 1, 16, 16)).shape == (2, 128)
    for wrong, views_BCHW in [
        (encoder, torch.rand(2, 3, 16, 16)),
        (build_encoder(SMALL, normalization=CIFAR10), torch.rand(2, 1, 16, 16)),
    ]:
        with pytest.raises(ValueError, match=r"the encoder takes [13] channels \(in_channels\), got views"):
            wrong(views_BCHW)
    for settings, said in (
        ({"in_channels": 1, "mean": CIFAR10.mean, "std": CIFAR10.std}, "in_channels is 1, but there are 3 numbers in"),
        ({"mean": CIFAR10.mean}, "mean and std belong together; set both, or neither"),
        ({"width": 32}, "width is 32, but a resnet18 has width 64"),
    ):
        with pytest.raises(UserError, match=said):
            ResNetConfig.parse({"kind": "resnet18"} | settings, where="encoder")


def test_an_encoder_normalises_by_the_data_unless_its_config_says_otherwise() -> None:
    views_BCHW, seen = torch.rand(2, 3, 16, 16), []
    named = SMALL.model_copy(update={"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)})
    for config, normalization in ((SMALL, CIFAR10), (named, CIFAR10), (named, None)):
        encoder = build_encoder(config, normalization=normalization)
        encoder.trunk.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
        encoder(views_BCHW)
    of_data, *of_config = seen
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (CIFAR10.mean, CIFAR10.std))
    torch.testing.assert_close(of_data, (views_BCHW - mean) / std)
    for normalised_BCHW in of_config:
        torch.testing.assert_close(normalised_BCHW, (views_BCHW - 0.5) * 4)
    of_neither = build_encoder(SMALL)
    for call in (of_neither, of_neither.features, of_neither.pooled):
        with pytest.raises(
            UserError, match=r"^the encoder has no mean and std by which it normalises pictures; set mean"
        ):
            call(views_BCHW)
    assert of_neither.feature_size(16, 16) == 32 * 2 * 2
    assert encoder.state_dict().keys() == of_neither.state_dict().keys()
    assert not encoder.state_dict().keys() & {"mean_C11", "std_C11"}  # a checkpoint has no part in it


def test_pictures_of_whole_numbers_are_refused() -> None:
    encoder = build_encoder(SMALL, normalization=CIFAR10)
    for call in (encoder, encoder.features, encoder.pooled, torch.compile(encoder, backend="eager")):
        with pytest.raises(UserError, match=r"^the encoder takes .* in \[0, 1\], got uint8; divide bytes by 255$"):
            call(torch.ones(2, 3, 16, 16, dtype=torch.uint8))


@pytest.mark.parametrize(("batch_norm", "num_groups"), [("synchronized", 2), ("local", 0)])
def test_groups_that_do_not_divide_the_rows_are_refused(num_groups: int, batch_norm: str) -> None:
    config = CONFIGS.validate_python({"kind": "resnet10", "width": 4, "batch_norm": batch_norm})
    encoder = build_encoder(config, normalization=CIFAR10)
    with pytest.raises(ValueError, match=f"5 rows cannot be cut into {num_groups} equal groups"):
        encoder(torch.rand(5, 3, 16, 16), num_groups)


def test_a_trunk_that_does_not_say_its_channels_is_refused_in_one_sentence() -> None:
    class Silent(Trunk):
        pass

    class SilentConfig(BaseEncoderConfig):
        kind: Literal["silent"] = "silent"

        def build_trunk(self) -> Trunk:
            return Silent()

    with pytest.raises(UserError, match=r"Silent has no num_channels; set it to the channels of .*its pool returns$"):
        build_encoder(SilentConfig())
