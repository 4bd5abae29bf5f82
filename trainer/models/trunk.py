"""The interface of trunks, and trunks of convolutions.

A trunk goes from pictures to the last map, and from the map to one vector for each picture.

Shapes: B pictures, C channels of the map, H by W pixels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from functools import cached_property
from itertools import groupby
from typing import Self

import torch
from torch import Tensor, nn

from data_pipeline.core.errors import UserError
from data_pipeline.core.kinds import path_of
from trainer.models.activation_checkpointing import Checkpointing, run_blocks
from trainer.models.batch_norm import SplitBatchNorm2d, SynchronizedBatchNorm2d, replace_batch_norm
from trainer.models.cast_weights import cast_weights
from trainer.models.random_layers import has_random_layers


class Trunk(nn.Module):
    """The base class of networks without a classifier, from pictures (B, `in_channels`, H, W) to their last map.

    Attributes:
        checkpointing: the part that the backward pass computes again, set after the trunk is built. A trunk may ignore
            it, and then needs more memory.
    """

    checkpointing: Checkpointing = "none"
    _frozen: tuple[nn.Module, ...] = ()

    @cached_property
    def num_channels(self) -> int:
        """Return the channels C of what `pool` returns. Every trunk sets this; raises `UserError` if it does not."""
        raise UserError(f"{path_of(type(self))} has no num_channels; set it to the channels of what its pool returns")

    def stage_parameters(self) -> list[list[nn.Parameter]]:
        """Return the parameters of the stem, and those of each stage, in the order in which they run; empty if unknown.

        `freeze` needs them.
        """
        return []

    def freeze(self, num_stages: int | None) -> None:
        """Keep the stem and the first `num_stages` stages as they are, and train the others; None trains all.

        Frozen parameters get no gradient, and frozen layers stay in eval mode, in which batch norm neither takes nor
        changes statistics. Raises `UserError` if there are fewer stages.
        """
        stages = self.stage_parameters()
        num_frozen = 0 if num_stages is None else num_stages + 1
        if num_frozen > len(stages):
            raise UserError(
                f"encoder.frozen_stages is {num_stages}, but this encoder has {max(0, len(stages) - 1)} stages after "
                "its stem (one of your own names them in Trunk.stage_parameters); set fewer, or null"
            )
        for number, stage in enumerate(stages):
            for parameter in stage:
                parameter.requires_grad_(number >= num_frozen)
        frozen = {parameter for stage in stages[:num_frozen] for parameter in stage}
        own = {layer: set(layer.parameters()) for layer in self.modules() if layer is not self}
        self._frozen = tuple(layer for layer, parameters in own.items() if parameters and parameters <= frozen)
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all layers, of which the frozen ones stay in eval mode."""
        super().train(mode)
        for module in self._frozen:
            module.eval()
        return self

    def pool(self, map_BCHW: Tensor) -> Tensor:
        """Return the mean of a map (B, C, H, W) over its pixels, at least in float32, or rows (B, C) as they are."""
        if map_BCHW.ndim == 2:
            return map_BCHW
        return map_BCHW.mean((2, 3), dtype=torch.promote_types(map_BCHW.dtype, torch.float32))

    def synchronize_batch_norm(self) -> None:
        """Make every batch norm work on the global batch. Raises `UserError` if one cannot."""
        replace_batch_norm(self, SynchronizedBatchNorm2d)

    def split_batch_norm(self, num_splits: int) -> None:
        """Make every batch norm work on equal groups of the global batch. Raises `UserError` if one cannot."""
        replace_batch_norm(self, SplitBatchNorm2d, num_splits=num_splits)

    def blocks(self) -> tuple[nn.Module, ...]:
        """Return the blocks, which run one after the other and are called as modules; empty if they are not known.

        An engine that cuts parameters gathers those of one block at a time.
        """
        return ()

    @property
    def as_published(self) -> nn.Module:
        """Return the module whose weights have the names of the library that others load them with."""
        return self


class ConvolutionalTrunk(nn.Sequential, Trunk):
    """Named layers, one after the other, from (B, `in_channels`, H, W) to a map (B, `num_channels`, H', W').

    `checkpointing` sets the blocks that the backward pass computes again. The stem is a block, and so is each block of
    a stage.
    """

    def __init__(self, layers: OrderedDict[str, nn.Module], *, num_channels: int) -> None:
        super().__init__(layers)
        self.num_channels = num_channels
        self._is_random = has_random_layers(self)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        with cast_weights(self, x_BCHW.device.type):
            if self.checkpointing == "none" or not self.training:  # a path that torch.compile can follow
                map_BCHW: Tensor = super().forward(x_BCHW)  # type: ignore[no-untyped-call]
                return map_BCHW
            return run_blocks(self._blocks(), x_BCHW, checkpointing=self.checkpointing, random=self._is_random)

    def synchronize_batch_norm(self) -> None:
        """Make every batch norm work on the global batch; a ReLU outside the stages becomes a part of the norm."""
        super().synchronize_batch_norm()
        norm = self._modules.get("bn1")
        if isinstance(norm, SynchronizedBatchNorm2d) and "relu" in self._modules:
            norm.with_relu = True
            self._modules["relu"] = nn.Identity()

    def blocks(self) -> tuple[nn.Module, ...]:
        return tuple(block for layer in self if isinstance(layer, nn.Sequential) for block in layer)

    def stage_parameters(self) -> list[list[nn.Parameter]]:
        """Return the parameters of the layers before the first stage, and of each stage."""
        stages: list[list[nn.Parameter]] = [[]]
        for layer in self:
            if isinstance(layer, nn.Sequential):
                stages.append([])
            if isinstance(layer, nn.Sequential) or len(stages) == 1:
                stages[-1] += layer.parameters()
        return stages

    def _blocks(self) -> list[nn.Module]:
        """Return each block of a stage, and one block for neighbouring layers outside the stages (stem, last norm)."""
        blocks: list[nn.Module] = []
        for is_stage, layers in groupby(self, lambda layer: isinstance(layer, nn.Sequential)):
            if is_stage:
                blocks += [block for stage in layers for block in stage.children()]
            else:
                blocks.append(nn.Sequential(*layers))
        return blocks


def draw_convolutions(trunk: nn.Module, *, except_for: Container[nn.Module] = ()) -> None:
    """Draw the weights of every convolution from a normal distribution with variance 2 / fan_out (He et al. 2015).

    The convolutions in `except_for` and all other layers keep their weights.
    """
    for module in trunk.modules():
        if isinstance(module, nn.Conv2d) and module not in except_for:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
