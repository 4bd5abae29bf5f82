"""Exchange weights with torchvision and timm, for architectures that both have.

The models of these libraries take normalised pictures, `(pictures - mean) / std`, while an `Encoder` normalises its
input itself. Both give equal pooled features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torchvision.models.resnet import ResNet

from data_pipeline.core.errors import UserError
from trainer.exports.model_card import timm_architecture
from trainer.models.encoder import Encoder, ResNetConfig, TimmConfig
from trainer.models.resnet import blocks_of_depth
from trainer.models.timm_trunk import load_timm
from trainer.pretrained import named_as_published, unwrapped

_CLASSIFIERS = ("fc.", "classifier.", "head.", "last_linear.")  # names of the classifier in torchvision and timm
_PARALLEL = "module."  # DataParallel and DistributedDataParallel put it before each name
_COUNTER = ".num_batches_tracked"  # batch norm had no such counter before torch 0.4.1
_TORCHVISION_WIDTH = 64

M = TypeVar("M", bound=nn.Module)


def to_torchvision(encoder: nn.Module) -> ResNet:
    """Return torchvision's ResNet with the weights of an encoder, in eval mode, with an identity as `fc`.

    The small form has another stem: a 3x3 `conv1` of stride 1, and an identity as `maxpool`.

    The encoder may be inside DataParallel, DistributedDataParallel or `torch.compile`. Raises `UserError` if
    torchvision has no such network.
    """
    encoder = unwrapped(encoder)
    config = encoder.config
    if not isinstance(config, ResNetConfig) or config.width != _TORCHVISION_WIDTH:
        raise UserError(f"torchvision has no network like {_name_of(encoder)}; only ResNets of width 64 are also its")
    block, num_blocks = blocks_of_depth(config.depth)
    with torch.random.fork_rng(devices=[]):
        model = ResNet(block, list(num_blocks))
        if config.form == "small":
            model.conv1 = nn.Conv2d(config.in_channels, _TORCHVISION_WIDTH, 3, padding=1, bias=False)
            model.maxpool = nn.Identity()
        else:
            model.conv1 = nn.Conv2d(config.in_channels, _TORCHVISION_WIDTH, 7, stride=2, padding=3, bias=False)
    model.fc = nn.Identity()
    if not config.stem_relu:
        model.relu = nn.Identity()  # torchvision uses this one only after its stem
    return _with_weights(model, encoder)


def to_timm(encoder: nn.Module) -> nn.Module:
    """Return the timm model with the weights of an encoder, in eval mode and without its classifier.

    The encoder may be wrapped, as for `to_torchvision`. Raises `UserError` if timm is not installed or has no such
    network.
    """
    encoder = unwrapped(encoder)
    config = encoder.config
    name, options = timm_architecture(config)
    if config is None or name is None:
        raise UserError(
            f"timm has no network like {_name_of(encoder)}; only encoders of timm, and resnet18, 34 and 50 in their "
            "standard form, are also its"
        )
    with torch.random.fork_rng(devices=[]):
        model: nn.Module = load_timm().create_model(
            name, pretrained=False, num_classes=0, in_chans=config.in_channels, **options
        )
    return _with_weights(model, encoder)


def load_published(encoder: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights with the names of torchvision or timm, such as `model.state_dict()`, into an encoder.

    The encoder may be wrapped, as for `to_torchvision`. The network of the weights may have been inside DataParallel;
    all their names then begin with "module.". If the weights are older than `num_batches_tracked`, the encoder keeps
    its own. Leaves out the weights of a classifier. The head of the encoder does not change. Raises `UserError` if any
    other weight is missing, is left over or has another shape; then the encoder does not change.
    """
    encoder = unwrapped(encoder)
    target = named_as_published(encoder)
    own = target.state_dict()
    if all(name.startswith(_PARALLEL) for name in weights):
        weights = {name.removeprefix(_PARALLEL): x for name, x in weights.items()}
    given = {name: x for name, x in own.items() if name.endswith(_COUNTER)}
    given |= {name: x for name, x in weights.items() if name in own or not name.startswith(_CLASSIFIERS)}
    problems = [f"{name} is missing" for name in own if name not in given]
    problems += [f"{name} has no place in the encoder" for name in given if name not in own]
    problems += [
        f"{name} has shape {tuple(given[name].shape)} in place of {tuple(x.shape)}"
        for name, x in own.items()
        if name in given and given[name].shape != x.shape
    ]
    if problems:
        raise UserError(
            f"the weights do not fit {_name_of(encoder)}: {problems[0]}, and {len(problems) - 1} more; choose the "
            "encoder.kind of the network that they come from"
        )
    target.load_state_dict(given)


def _with_weights(model: M, encoder: Encoder) -> M:
    model.load_state_dict(named_as_published(encoder).state_dict())
    like = next(encoder.parameters())
    return model.to(like.device, like.dtype).eval()


def _name_of(encoder: Encoder) -> str:
    config = encoder.config
    if config is None:
        return "this encoder"
    return f"timm's {config.name}" if isinstance(config, TimmConfig) else f"{config.kind} of this package"
