"""The viewmaker from torch's own layers, in the paper's order: what ours must equal, and what it is timed against."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as tv

from data_pipeline.core.counter_rng import DrawKeys, uniform
from trainer.views.viewmaker import Viewmaker


class AsWritten(nn.Module):
    """Has copies of a viewmaker's parameters, and the same keys give the same noise."""

    def __init__(self, viewmaker: Viewmaker) -> None:
        super().__init__()
        self.config = viewmaker.config
        stem = [conv_norm_of(viewmaker.stem[i], stride=stride) for i, stride in enumerate((1, 2, 2))]
        self.stem = nn.Sequential(*itertools.chain(*((layer, nn.ReLU()) for layer in stem)))
        self.blocks = nn.ModuleList(
            nn.Sequential(conv_norm_of(block.first), nn.ReLU(), conv_norm_of(block.second))
            for block in viewmaker.blocks
        )
        up = [
            nn.Sequential(nn.Upsample(scale_factor=2), conv_norm_of(layer), nn.ReLU()) for layer in viewmaker.upsample
        ]
        self.upsample = nn.Sequential(*up)
        self.out = conv_of(viewmaker.out)

    def forward(self, x: Tensor, keys: DrawKeys) -> Tensor:
        small = self.config.downsample_to
        y = x if small is None else resize(x, small)
        y = self.stem(with_noise(y, keys, layer=0))
        for layer, block in enumerate(self.blocks, start=1):
            y = with_noise(y, keys, layer=layer)
            y = y + block(y)
        u = torch.tanh(self.out(self.upsample(y)))
        delta = self.config.budget * u / (u.abs().mean((1, 2, 3), keepdim=True) + 1e-4)
        views = x + (delta if small is None else resize(delta, x.shape[-1]))
        return views.clamp(0, 1) if self.config.clamp else views


def resize(x: Tensor, size: int) -> Tensor:
    """Bilinear, without antialiasing."""
    resized: Tensor = tv.resize(x, [size, size], antialias=False)
    return resized


def with_noise(x: Tensor, keys: DrawKeys, *, layer: int) -> Tensor:
    height, width = x.shape[2:]
    noise = uniform(keys, height * width, purpose=1 + layer).view(-1, 1, height, width)
    return torch.cat([x, noise.to(x.dtype)], dim=1)


def conv_of(ours: Any, *, stride: int = 1) -> nn.Conv2d:
    size = ours.kernel_size[0]
    conv = nn.Conv2d(
        ours.in_channels, ours.out_channels, size, stride=stride, padding=size // 2, padding_mode="reflect"
    ).to(ours.weight.dtype)
    conv.load_state_dict(ours.state_dict())
    return conv


def conv_norm_of(ours: Any, *, stride: int = 1) -> nn.Sequential:
    norm = nn.InstanceNorm2d(ours.conv.out_channels, affine=True).to(ours.conv.weight.dtype)
    norm.load_state_dict(ours.norm.state_dict())
    return nn.Sequential(conv_of(ours.conv, stride=stride), norm)
