"""Activation checkpointing: keep only the input of every few blocks, and compute the rest again in the backward pass.

It saves memory and changes no gradient (Chen et al. 2016).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data_pipeline.core.schema import Count
from trainer.models.batch_norm import reenter_groups

Checkpointing = Literal["none", "whole"] | Count


def run_blocks(
    blocks: Sequence[Callable[[Tensor], Tensor]],
    x: Tensor,
    *,
    checkpointing: Checkpointing,
    random: bool = False,
) -> Tensor:
    """Run `x` through all blocks, one after the other.

    The backward pass computes segments of blocks again. The recomputation does not change buffers (running statistics
    of batch norm), and has the same `grouped_statistics`.

    checkpointing: the number of blocks in a segment; "whole" for all blocks, "none" for no recomputation.
    random: whether the blocks draw from torch's generators; then their state is restored for the recomputation.
    """
    if checkpointing == "none" or not torch.is_grad_enabled():
        return _run(blocks, x)
    size = len(blocks) if checkpointing == "whole" else checkpointing
    for start in range(0, len(blocks), size):
        segment = blocks[start : start + size]
        owners = [getattr(block, "__self__", block) for block in segment]  # of a method, the module that has it
        modules = [owner for owner in owners if isinstance(owner, nn.Module)]
        # Blocks without state need no context, with which torch.compile could not follow.
        contexts: dict[str, Any] = {}
        if modules:
            contexts["context_fn"] = partial(_contexts, modules, reenter_groups())
        x = checkpoint(_run, segment, x, use_reentrant=False, preserve_rng_state=random, **contexts)
    return x


def _contexts(
    modules: list[nn.Module], grouped_as_before: Callable[[], AbstractContextManager[None]]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the first forward pass and of the recomputation."""

    @contextmanager
    def recomputation() -> Iterator[None]:
        with buffers_untouched(*modules), grouped_as_before():
            yield

    return nullcontext(), recomputation()


def _run(blocks: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


@contextmanager
def buffers_untouched(*modules: nn.Module) -> Iterator[None]:
    """Inside the block, replace the modules' buffers by copies, so that writes do not reach the buffers.

    The buffers are never written, not even to restore them, because a graph may need them for its backward pass.
    """
    owners = [inner for module in modules for inner in module.modules() if inner._buffers]
    kept = [dict(owner._buffers) for owner in owners]
    for owner, buffers in zip(owners, kept, strict=True):
        owner._buffers.update({name: None if value is None else value.clone() for name, value in buffers.items()})
    try:
        yield
    finally:
        for owner, buffers in zip(owners, kept, strict=True):
            owner._buffers.update(buffers)
