"""The encoder: a residual network without its classifier (the trunk) and a head that makes the embedding.

Pictures come in as (B, 3, H, W) in [0, 1]: the encoder itself normalises them, so that no view policy has to know the
data's mean and deviation.

Shapes: B pictures, C channels of the trunk's last map, H by W pixels, F = C * ceil(H / 8) * ceil(W / 8), D embedding.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from data_pipeline.schema import Schema
from trainer.models.batch_norm import synchronize_batch_norm

NUM_STAGES = 4


class _Fields(Schema):
    """What every encoder takes.

    `head`: one linear layer, or linear-ReLU-linear with a hidden layer as wide as the trunk. `batch_norm`: statistics
    over the global batch, or over each rank's part (then results depend on the number of ranks). `mean` and `std` are
    per channel, in [0, 1] units; the defaults are CIFAR-10's as Tamkin et al. 2022 use them.
    """

    embedding_size: PositiveInt = 128
    head: Literal["linear", "mlp"] = "linear"
    batch_norm: Literal["synchronized", "local"] = "synchronized"
    mean: tuple[float, float, float] = (0.491, 0.482, 0.446)
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (0.247, 0.243, 0.261)


class ResNet18SmallConfig(_Fields):
    """ResNet-18 for small pictures: 3x3 stem of stride 1, no max-pooling (Chen et al. 2020, appendix B.9)."""

    kind: Literal["resnet18_small"] = "resnet18_small"


class ResNet10Config(_Fields):
    """One basic block a stage instead of two, and narrow: at width 16, 324,048 parameters, for CPUs."""

    kind: Literal["resnet10"] = "resnet10"
    width: PositiveInt = 16


EncoderConfig = Annotated[ResNet18SmallConfig | ResNet10Config, Field(discriminator="kind")]


class Encoder(nn.Module):
    """Pictures to embeddings. `trunk` ends with the last ReLU, before pooling; its parameters bear torchvision's names.

    Under autocast the trunk runs in the autocast type; normalisation, pooling and head, and all outputs, are float32.
    """

    mean_C11: Tensor
    std_C11: Tensor

    def __init__(
        self,
        trunk: nn.Module,
        head: nn.Module,
        *,
        num_channels: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head
        self.num_channels = num_channels
        # The config holds these; in a checkpoint they would be a second truth.
        self.register_buffer("mean_C11", torch.tensor(mean).reshape(-1, 1, 1), persistent=False)
        self.register_buffer("std_C11", torch.tensor(std).reshape(-1, 1, 1), persistent=False)

    def forward(self, views_BCHW: Tensor) -> Tensor:
        """Embeddings (B, D), not of unit length: what an objective compares."""
        pooled_BC = self.pooled(views_BCHW)
        with torch.autocast(pooled_BC.device.type, enabled=False):
            embeddings_BD: Tensor = self.head(pooled_BC)
        return embeddings_BD

    def features(self, views_BCHW: Tensor) -> Tensor:
        """The trunk's last map, flattened, (B, F): what the linear probe reads."""
        return _at_least_float32(self._map(views_BCHW)).flatten(1)

    def pooled(self, views_BCHW: Tensor) -> Tensor:
        """The mean of the trunk's last map over its pixels, (B, C): what kNN reads."""
        return _at_least_float32(self._map(views_BCHW)).mean((2, 3))

    def feature_size(self, height: int, width: int) -> int:
        """F for pictures of this size: three stages halve it, rounding up."""
        return self.num_channels * -(-height // 8) * -(-width // 8)

    @property
    def pooled_size(self) -> int:
        return self.num_channels

    def _map(self, views_BCHW: Tensor) -> Tensor:
        normalised_BCHW = (_at_least_float32(views_BCHW) - self.mean_C11) / self.std_C11
        map_BCHW: Tensor = self.trunk(normalised_BCHW)
        return map_BCHW


def build_encoder(config: EncoderConfig) -> Encoder:
    """A freshly initialised encoder; the weights come from torch's default generator."""
    match config:
        case ResNet18SmallConfig():
            width, num_blocks = 64, 2
        case ResNet10Config():
            width, num_blocks = config.width, 1
    trunk = _resnet_trunk(width, num_blocks)
    if config.batch_norm == "synchronized":
        synchronize_batch_norm(trunk)
    num_channels = width * 2 ** (NUM_STAGES - 1)
    head: nn.Module = nn.Linear(num_channels, config.embedding_size)
    if config.head == "mlp":
        head = nn.Sequential(nn.Linear(num_channels, num_channels), nn.ReLU(), head)
    return Encoder(trunk, head, num_channels=num_channels, mean=config.mean, std=config.std)


def _resnet_trunk(width: int, num_blocks: int) -> nn.Module:
    """3x3 stem and four stages of torchvision's basic blocks, widths w, 2w, 4w, 8w, initialised as torchvision does."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(3, width, 3, padding=1, bias=False), bn1=nn.BatchNorm2d(width), relu=nn.ReLU(inplace=True)
    )
    num_in = width
    for stage in range(NUM_STAGES):
        num_out, stride = width * 2**stage, 1 if stage == 0 else 2
        shortcut = (
            nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)) if stage else None
        )
        blocks = [BasicBlock(num_in, num_out, stride, shortcut)]
        blocks += [BasicBlock(num_out, num_out) for _ in range(num_blocks - 1)]
        layers[f"layer{stage + 1}"] = nn.Sequential(*blocks)
        num_in = num_out
    trunk = nn.Sequential(layers)
    for module in trunk.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return trunk


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
