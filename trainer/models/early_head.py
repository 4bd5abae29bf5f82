"""A small head on the pooled output of an early block, whose gradients are kept apart, for the objective `sieve`.

Its layers run twice on the same features. The first outputs train the layers, and the trunk gets no gradient from them.
The second outputs train the trunk up to the block, and the layers get no gradient from them. In training, both stand
behind the columns of the embedding; in eval mode there is no early head, so probes and exports read the same as ever.

Shapes: B pictures, C channels of the block's output, D embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data_pipeline.core.errors import UserError
from trainer.models.trunk import Trunk


class _Routed(nn.Linear):
    """A dense layer whose weights learn from the first half of the rows only."""

    def forward(self, x: Tensor) -> Tensor:
        learning, forgetting = x.chunk(2)
        fixed = F.linear(forgetting, self.weight.detach(), self.bias.detach())
        return torch.cat([F.linear(learning, self.weight, self.bias), fixed])


class EarlyHead(nn.Module):
    """Two layers on block number `block` of a trunk, from 1, with weights from torch's default generator.

    Raises `UserError` if the trunk has fewer blocks.
    """

    def __init__(self, trunk: Trunk, block: int, size: int) -> None:
        blocks = trunk.blocks()
        if len(blocks) < block:
            raise UserError(
                f"encoder.early_head is block {block}, but this encoder has {len(blocks)} blocks (one of your own "
                "names them in Trunk.blocks); set a lower number, or 0"
            )
        super().__init__()
        self._number = block - 1
        last = [layer for layer in blocks[block - 1].modules() if isinstance(layer, nn.Conv2d | nn.Linear)][-1]
        self.layers = nn.Sequential(_Routed(len(last.weight), size), nn.ReLU(), _Routed(size, size))

    @contextmanager
    def reading(self, trunk: Trunk, *, into: list[Tensor]) -> Iterator[None]:
        """Append the output of the block to a list when the trunk runs inside; not when it is recomputed later."""
        hook = trunk.blocks()[self._number].register_forward_hook(lambda *call: into.append(call[-1]))
        try:
            yield
        finally:
            hook.remove()

    def forward(self, output: Tensor) -> Tensor:
        """Return the columns that train the layers and those that train the trunk, (B, 2 D).

        `output` is a map (B, C, H, W), tokens (B, T, C) or rows (B, C).
        """
        pooled_BC = output.mean((2, 3)) if output.dim() == 4 else output.mean(1) if output.dim() == 3 else output
        return torch.cat(self.layers(torch.cat([pooled_BC.detach(), pooled_BC])).chunk(2), dim=1)
