"""How training uses memory: what is recomputed instead of kept, and what the process gives back.

Gradient checkpointing keeps the input of every few blocks and computes what is between again while going backward (Chen
et al. 2016). A batch in micro batches keeps the activations of one part at a time (Gao et al. 2021; see
`trainer.step`). Neither changes a gradient.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data_pipeline.schema import BatchSize, Count, Schema

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST = 2**31 - 1

Checkpointing = Literal["none", "whole"] | Count


class MemoryConfig(Schema):
    """What is traded for memory.

    micro_batches: the batch is encoded in so many parts, with the activations of one part in memory; the loss is still
        that of the whole batch. Every part is spread over all ranks, so results do not depend on their number; batch
        norm sees one part at a time, and so its statistics do depend on this setting.
    encoder_checkpointing, viewmaker_checkpointing: "whole" keeps the network's input alone and computes everything else
        again for backward; n keeps the input of every n-th block.
    """

    micro_batches: BatchSize = 1
    encoder_checkpointing: Checkpointing = "none"
    viewmaker_checkpointing: Checkpointing = "none"


def run_blocks(
    blocks: Sequence[Callable[[Tensor], Tensor]],
    x: Tensor,
    *,
    checkpointing: Checkpointing,
    random: bool = False,
    again: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Tensor:
    """`x` through all blocks, one after the other. Going backward, segments of blocks are computed again, as
    `checkpointing` says; buffers (batch norm's statistics) are then left alone.

    `random`: the blocks draw from torch's generators, whose state is kept for the second time. `again` makes a context
    for the second time, where the first has one that is over by then.
    """
    if checkpointing == "none" or not torch.is_grad_enabled():
        return _run(blocks, x)
    size = len(blocks) if checkpointing == "whole" else checkpointing
    for start in range(0, len(blocks), size):
        segment = blocks[start : start + size]
        modules = [block for block in segment if isinstance(block, nn.Module)]
        contexts = partial(_first_and_again, modules, again)
        x = checkpoint(_run, segment, x, use_reentrant=False, preserve_rng_state=random, context_fn=contexts)
    return x


def _first_and_again(
    modules: list[nn.Module], again: Callable[[], AbstractContextManager[None]]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _second_time(modules, again)


@contextmanager
def _second_time(modules: list[nn.Module], again: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    with buffers_untouched(*modules), again():
        yield


def _run(blocks: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


@contextmanager
def buffers_untouched(*modules: nn.Module) -> Iterator[None]:
    """While open, what the modules write to their buffers goes to copies, which are then forgotten.

    The buffers themselves are not written to, not even back: a graph that waits for its backward may hold them.
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


def interleave(parts: Sequence[Tensor]) -> Tensor:
    """Undo the cut into micro batches: of k tensors (B / k, ...) part i holds the rows i, i + k, i + 2 k, ..."""
    return parts[0] if len(parts) == 1 else torch.stack(list(parts), dim=1).flatten(0, 1)


def keep_freed_memory() -> None:
    """Let the process keep the memory that it frees instead of giving it back to the system at once.

    A training step on the CPU frees and takes the same large blocks again and again. By default glibc maps and unmaps
    each of them, and clearing the fresh pages is a quarter of a viewmaker's step. Elsewhere this does nothing.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, _LARGEST)
