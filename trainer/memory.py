"""Save memory by computing activations again, and keep freed memory for the process.

Activation checkpointing keeps the input of every few blocks, and computes the rest again in the backward pass (Chen et
al. 2016). Micro batches keep the activations of one part of the batch at a time (Gao et al. 2021; see `trainer.step`).
Neither changes a gradient.
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
_LARGEST = 2**31 - 1  # an int of C


class MemoryConfig(Schema):
    """The settings that save memory by computing activations again.

    micro_batches: the number of parts in which the batch is encoded, with the activations of one part in memory. The
        loss is still computed over the whole batch. Every part is spread over all ranks, so results do not depend on
        the number of ranks. Batch norm sees one part at a time, so its statistics depend on this setting.
    encoder_checkpointing, viewmaker_checkpointing: "whole" keeps only the input of the network and computes the rest
        again in the backward pass; n keeps the input of every n-th block.
    """

    micro_batches: BatchSize = 1
    encoder_checkpointing: Checkpointing = "none"
    viewmaker_checkpointing: Checkpointing = "none"


def interleave(parts: Sequence[Tensor]) -> Tensor:
    """Join k micro batches (B / k, ...) to a batch (B, ...); part i holds the rows i, i + k, i + 2 k, ..."""
    return parts[0] if len(parts) == 1 else torch.stack(list(parts), dim=1).flatten(0, 1)


def keep_freed_memory() -> None:
    """Let the process keep the memory that it frees, instead of returning it to the system at once.

    A training step on the CPU frees and allocates the same large blocks again and again. By default, glibc maps and
    unmaps each of them, and clearing the new pages takes a quarter of a viewmaker's step. Does nothing without glibc.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, _LARGEST)
