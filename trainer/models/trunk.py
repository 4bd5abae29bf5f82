"""The interface of trunks, and trunks of convolutions.

A trunk goes from pictures to the last map, and from the map to one vector for each picture.

Shapes: B pictures, C channels of the map, H by W pixels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from itertools import groupby

from torch import Tensor, nn

from trainer.models.activation_checkpointing import Checkpointing, run_blocks
from trainer.models.batch_norm import SplitBatchNorm2d, SynchronizedBatchNorm2d, reenter_groups, replace_batch_norm
from trainer.models.random_layers import has_random_layers


class Trunk(nn.Module):
    """The base class of networks without a classifier, from pictures (B, `in_channels`, H, W) to their last map.

    Attributes:
        num_channels: the channels C of what `pool` returns.
        checkpointing: the part that the backward pass computes again, set after the trunk is built. A trunk may ignore
            it, and then needs more memory.
    """

    num_channels: int
    checkpointing: Checkpointing = "none"

    def pool(self, map_BCHW: Tensor) -> Tensor:
        """Return one vector for each picture, (B, C): the mean of the map over its pixels."""
        return map_BCHW.mean((2, 3))

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
        self.checkpointing: Checkpointing = "none"
        self._is_random = has_random_layers(self)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        if self.checkpointing == "none" or not self.training:  # a path that torch.compile can follow
            map_BCHW: Tensor = super().forward(x_BCHW)  # type: ignore[no-untyped-call]
            return map_BCHW
        return run_blocks(
            self._blocks(),
            x_BCHW,
            checkpointing=self.checkpointing,
            random=self._is_random,
            recompute_context=reenter_groups(),
        )

    def blocks(self) -> tuple[nn.Module, ...]:
        return tuple(block for layer in self if isinstance(layer, nn.Sequential) for block in layer)

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
