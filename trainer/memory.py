"""How training uses memory: what is recomputed instead of kept, and what the process gives back.

Gradient checkpointing keeps the input of every few blocks and computes what is between again while going backward (Chen
et al. 2016). A batch in micro batches keeps the activations of one part at a time (Gao et al. 2021; see
`trainer.step`). Neither changes a gradient.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence

import torch
from torch import Tensor

from data_pipeline.core.schema import BatchSize, Schema
from trainer.models.activation_checkpointing import Checkpointing

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


_LARGEST = 2**31 - 1


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
