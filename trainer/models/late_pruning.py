"""Late pruning: the last blocks of the trunk encode the second view of a step with a random part of their weights.

Hamidieh et al. (2024, LateTVG, arXiv 2406.18562) regularise late layers by pruning, so that representations lose
spurious features. It makes a view in the space of features and needs no label: a feature that depends on few of the
weights does not agree in the two views. Here the masks are random.

Each step draws which weights are left out, the same ones for all samples, micro batches and ranks. Pruned weights have
no part in the second view and no gradient from it. In eval mode nothing is pruned.

Shapes: 2 B rows, of which the first B are first views; O outputs of a layer, N weights of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data_pipeline.core.counter_rng import DrawKeys, uniform
from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import Count, Schema, ShareBelowOne
from trainer.models.trunk import Trunk

_FIRST_PURPOSE: Final = 300  # `purpose` in `data_pipeline.core.counter_rng`; each layer has its own


class LatePruningConfig(Schema):
    """The config of late pruning.

    blocks: the number of blocks at the end of the trunk (`Trunk.blocks`) whose convolutions and dense layers are
        pruned.
    share: the probability of each of their weights to be left out.
    """

    blocks: Count = 1
    share: ShareBelowOne = 0.5


class _Pruned(nn.Module):
    """The part of a layer that prunes; the other part is a layer of torch, whose weight and names stay."""

    weight: Tensor
    share: float
    purpose: int
    seed: int
    step: Tensor | None  # 0-d int64, which a compiled or recorded step reads anew; None until the first step
    first_view: int

    def of_both_views(self, x: Tensor, layer: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the outputs of a layer `layer(x, weight)`, for the second half of the rows with pruned weights."""
        if not self.training or self.step is None:
            return layer(x, self.weight)
        first, second = x.chunk(2)
        return torch.cat([layer(first, self.weight), layer(second, self.weight * self.kept().to(self.weight.dtype))])

    def kept(self) -> Tensor:
        """Draw which weights are kept in the step, a bool for each: a function of (seed, step, layer, weight)."""
        assert self.step is not None
        index_O = torch.arange(len(self.weight), device=self.weight.device)
        keys = DrawKeys(  # with the step in place of the epoch
            seed=self.seed, epoch=0, index_B=index_O, view=self.first_view, recorded_epoch=self.step
        )
        numbers_ON = uniform(keys, self.weight[0].numel(), purpose=self.purpose)
        return (numbers_ON >= self.share).view(self.weight.shape)


class _PrunedConv2d(_Pruned, nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return self.of_both_views(x, lambda rows, weight: self._conv_forward(rows, weight, self.bias))


class _PrunedLinear(_Pruned, nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.of_both_views(x, lambda rows, weight: F.linear(rows, weight, self.bias))


_PRUNED: Final[dict[type[nn.Module], type[_Pruned]]] = {nn.Conv2d: _PrunedConv2d, nn.Linear: _PrunedLinear}


def prune_late(trunk: Trunk, config: LatePruningConfig) -> None:
    """Make the layers of the last blocks of a trunk ones that prune. Raises `UserError` if it has fewer blocks."""
    blocks = trunk.blocks()
    if len(blocks) < config.blocks:
        raise UserError(
            f"encoder.late_pruning.blocks is {config.blocks}, but this encoder has {len(blocks)} blocks (one of your "
            "own names them in Trunk.blocks); set fewer, or encoder.late_pruning=null"
        )
    layers = [layer for block in blocks[-config.blocks :] for layer in block.modules() if type(layer) in _PRUNED]
    for number, layer in enumerate(layers):
        layer.__class__ = _PRUNED[type(layer)]
        layer.share, layer.purpose, layer.step = config.share, _FIRST_PURPOSE + number, None  # type: ignore[assignment]


def set_pruned_step(encoder: nn.Module, *, seed: int, step: int | Tensor, first_view: int) -> None:
    """Let the pruned layers of an encoder draw for a step, until the next call, also when activations are recomputed.

    `step` is a number, or a 0-d int64 tensor for a step that is recorded and replayed. `first_view` numbers the updates
    of a step. An encoder without pruned layers does not change.
    """
    for layer in encoder.modules():
        if isinstance(layer, _Pruned):
            layer.seed, layer.first_view = seed, first_view
            layer.step = torch.as_tensor(step, device=layer.weight.device)
