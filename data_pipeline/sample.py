"""THE sample contract: what a source yields, what an overlay returns, what a shard stores, what a batch holds.

Two label spaces travel together and never mix: `label_base` (what the photo shows) and `label_overlay` (what was drawn
on it; `NO_LABEL` where nothing was drawn).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

NO_LABEL = -1

MASK_OUTSIDE = 0  #   the photo, untouched
MASK_BOX = 128  #     inside the tight box of the object, pixel itself untouched
MASK_OBJECT = 255  #  a pixel that the overlay drew on


@dataclass(frozen=True)
class Record:
    """One clean picture of a source: `image` is (H, W, 3) uint8, `label` indexes the source's class names."""

    image: NDArray[np.uint8]
    label: int


@dataclass(frozen=True)
class Overlaid:
    """What an overlay returns: the picture with the object drawn on it, the object's class and its place.

    `image` is (H, W, 3) uint8; `mask` is (H, W) uint8 with the three levels `MASK_OUTSIDE`, `MASK_BOX`, `MASK_OBJECT`.
    """

    image: NDArray[np.uint8]
    label: int
    mask: NDArray[np.uint8]


@dataclass(frozen=True)
class Sample:
    """One stored sample. In a shard: `KEY.png` (RGB), `KEY.mask.png` (8-bit grey), `KEY.json` (labels and index).

    `index` counts samples of the whole dataset from 0 and is the key of every random draw made for this sample later.
    With `--repeats R`, sample `i` shows source picture `i % num_pictures`.
    """

    index: int
    image: NDArray[np.uint8]
    mask: NDArray[np.uint8]
    label_base: int
    label_overlay: int

    @property
    def key(self) -> str:
        return f"{self.index:08d}"


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch, on the host.

    Attributes:
        step: number of the global batch since the start of training, from 0.
        epoch: from 0.
        index_B: (B,) int64, the samples' dataset indices.
        images_BCHW: (B, 3, H, W) uint8.
        masks_BHW: (B, H, W) uint8, levels as in `Overlaid`.
        label_base_B, label_overlay_B: (B,) int64; `NO_LABEL` where there is no overlay.
    """

    step: int
    epoch: int
    index_B: torch.Tensor
    images_BCHW: torch.Tensor
    masks_BHW: torch.Tensor
    label_base_B: torch.Tensor
    label_overlay_B: torch.Tensor

    def __len__(self) -> int:
        return self.index_B.numel()

    @property
    def keys(self) -> list[str]:
        return [f"{index:08d}" for index in self.index_B.tolist()]

    def pin_memory(self) -> Batch:
        """Called by `DataLoader(pin_memory=True)`, so that the copy to the device can be asynchronous."""
        return self._map(torch.Tensor.pin_memory)

    def to(self, device: torch.device) -> Batch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        return Batch(
            step=self.step,
            epoch=self.epoch,
            index_B=move(self.index_B),
            images_BCHW=move(self.images_BCHW),
            masks_BHW=move(self.masks_BHW),
            label_base_B=move(self.label_base_B),
            label_overlay_B=move(self.label_overlay_B),
        )
