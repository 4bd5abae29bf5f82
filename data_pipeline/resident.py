"""Resident data: a dataset that fits is read once and stays in memory, so that no step waits for data.

Comes in: a store. Goes out: every sample as it is stored, on the training device or in host memory that the ranks of a
node share. What is in a batch, and what is drawn on it, is decided elsewhere, from the same numbers as for data that is
streamed. What may never happen: memory that outlives the processes which hold it, or a rank that waits for one that
gave up.

Shapes: B batch, N all samples, C channels, H height, W width, X points of all sounds laid end to end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from data_pipeline.sample import BadSample
from data_pipeline.store import Stored

SHARED: Final = Path("/dev/shm")  # memory that looks like files, of one machine or container


@dataclass(frozen=True)
class NodeShare:
    """How the ranks that see the same `SHARED` hold one copy of resident data together.

    Attributes:
        local_rank: this rank's number among them, from 0; number 0 reads for all.
        barrier: returns once every rank of the run has called it; all ranks make the same number of calls.
        token: a file name for this run and dataset, the same on all of them.
    """

    local_rank: int
    barrier: Callable[[], None]
    token: str


def shared_memory_identity() -> str:
    """The same for two processes exactly where they see the same `SHARED`, and so can hold data together."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {SHARED.stat().st_dev}"
    except OSError:
        return f"{os.uname().nodename} {os.getpid()}"


@dataclass(frozen=True)
class Rows:
    """Samples as they are stored, in memory: some of a dataset, or all of it.

    Attributes:
        index_B: (B,) int64 dataset indices.
        label_base_B, label_overlay_B: (B,) int64.
        pictures_BCHW: uint8; None for sounds.
        masks_BHW: uint8; None where nothing is drawn into the shards.
        points_X: the sounds, int16 or float32, end to end, maybe with others between them; None for pictures.
        start_B, length_B: (B,) int64, where each sound lies in `points_X`; None for pictures.
        longest: no sound has more points than this.
    """

    index_B: Tensor
    label_base_B: Tensor
    label_overlay_B: Tensor
    pictures_BCHW: Tensor | None
    masks_BHW: Tensor | None
    points_X: Tensor | None = None
    start_B: Tensor | None = None
    length_B: Tensor | None = None
    longest: int = 0

    @classmethod
    def of(cls, stored: Stored, *, masked: bool) -> Rows:
        """The rows of a store's answer, bad ones included; `masked`: whether its shards hold masks."""
        points_X = start_B = length_B = None
        if stored.clips is not None:
            length_B = torch.tensor([len(clip) for clip in stored.clips])
            start_B = length_B.cumsum(0) - length_B
            points_X = torch.cat(stored.clips)
        return cls(
            index_B=stored.index_B,
            label_base_B=stored.label_base_B,
            label_overlay_B=stored.label_overlay_B,
            pictures_BCHW=stored.pictures_BCHW,
            masks_BHW=stored.masks_BHW if masked else None,
            points_X=points_X,
            start_B=start_B,
            length_B=length_B,
            longest=0 if length_B is None else int(length_B.max()),
        )

    def take(self, row_B: Tensor) -> Rows:
        """The rows numbered `row_B`, (B,) int64 on the same device, in that order."""

        def select(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.index_select(0, row_B)

        return Rows(
            index_B=self.index_B.index_select(0, row_B),
            label_base_B=self.label_base_B.index_select(0, row_B),
            label_overlay_B=self.label_overlay_B.index_select(0, row_B),
            pictures_BCHW=select(self.pictures_BCHW),
            masks_BHW=select(self.masks_BHW),
            points_X=self.points_X,
            start_B=select(self.start_B),
            length_B=select(self.length_B),
            longest=self.longest,
        )


@dataclass(frozen=True)
class Resident:
    """A whole dataset in memory: row i is sample i; what is in a row whose index is in `bad` means nothing."""

    rows: Rows
    bad: Mapping[int, BadSample]
