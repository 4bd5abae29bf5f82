"""The containers of samples: records of a source, stored samples, and batches.

A sample is a picture or a sound with any number of named labels. `base` says what the picture shows or which digit is
spoken. `overlay` says what was drawn on the picture or is heard behind the digit. Sources and overlays may give others.
The labels of an overlay that is drawn at each reading are `NO_LABEL` until it is drawn.

Shapes: B batch, C channels, H height, W width, T points of a waveform.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from data_pipeline.core.counter_rng import DrawKeys

Medium = Literal["picture", "sound"]
Layout = Literal["scaled", "tiled"]  # of an overlay, on pictures of more than 32 pixels; see `PictureOverlay`

NO_LABEL = -1  # the class of a sample without this label
FILE_ENTRY = "__file__"  # of the JSON of a sample, beside its labels, none of which has such a name: see `Record`
BASE, OVERLAY = "base", "overlay"  # the labels that most datasets have; see `Manifest.labels` for all

MASK_OUTSIDE = 0  #   outside the object's box
MASK_BOX = 128  #     inside the smallest box around the object, but not drawn on
MASK_OBJECT = 255  #  drawn on by the overlay


def sample_key(index: int) -> str:
    """Return the key of a sample: the name of its members in a shard, without their endings."""
    return f"{index:08d}"


@dataclass(frozen=True)
class Record:
    """One clean picture or sound of a source; `label` is its base label, an index into the source's class names.

    `content` is a picture, (H, W, C) uint8, or a sound of any length, (T,) int16. `file` is the path of its file below
    the folder of the source; empty if it has no file of its own. `remarks` say what is odd about it, or what was
    changed when it was decoded, each as words that go on "it ...".
    """

    content: NDArray[np.uint8] | NDArray[np.int16]
    label: int
    file: str = ""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One stored sample. `data_pipeline.storage.write` names its members in a shard.

    `index` counts the samples of the dataset from 0, and is part of the key of every random draw for this sample. With
    `--repeats R`, samples `i` and `i + num_records` show the same record of the source.

    `content` is a picture, (H, W, C) uint8, or a sound, (T,): int16 as recorded, or float32 if an overlay was mixed in.
    `mask` is (H, W) uint8 in the levels above, or None without an overlay in the shard; then there is no `.mask.png`.
    `labels` maps names of labels to numbers of classes. A label that is not named is stored as `NO_LABEL`.
    """

    index: int
    content: NDArray[np.uint8] | NDArray[np.int16] | NDArray[np.float32]
    mask: NDArray[np.uint8] | None
    labels: Mapping[str, int]

    @property
    def key(self) -> str:
        return sample_key(self.index)


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be read, with the reason; `shard` is the file name.

    In a mixture, `index` counts the samples of all sources, `first` is the index of the first sample of its source, and
    `shard` begins with the name of the source.
    """

    index: int
    shard: str
    reason: str
    first: int = 0

    @property
    def key(self) -> str:
        return sample_key(self.index - self.first)


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch.

    Attributes:
        step: number of the global batch since the start of training, from 0.
        epoch: number of the epoch, from 0.
        index_B: (B,) int64, the dataset indices of the samples. In a mixture, they count the samples of all sources,
            one source after another.
        inputs_a: the input of the first view: pictures (B, C, H, W) uint8, or waveforms (B, T) float32.
        inputs_b: the input of the second view. It is the same tensor object, unless the overlay is drawn once for each
            view (`noise_per_view` of the spoken digits).
        masks_BHW, masks_b_BHW: (B, H, W) uint8, the masks of `inputs_a` and `inputs_b` in the levels above; None for
            sounds, and zeros if nothing was drawn.
        labels: each label of the dataset by name, (B,) int64; `NO_LABEL` for a sample without it. Those of an overlay
            are of `inputs_a`.
        bad: samples of this rank's part that could not be read and were replaced.
        seconds: time that each stage of making the batch took: "read", "decode", "overlay", "transfer".
        group_size: the number of rows that stand together as a group of near neighbours; None if rows are not grouped.
        draw_index_B: (B,) int64, of a mixture: a number for each sample and epoch of its source, which stands for both
            in the keys of draws; None for one dataset.
    """

    step: int
    epoch: int
    index_B: torch.Tensor
    inputs_a: torch.Tensor
    inputs_b: torch.Tensor
    masks_BHW: torch.Tensor | None
    masks_b_BHW: torch.Tensor | None
    labels: Mapping[str, torch.Tensor]
    bad: tuple[BadSample, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    draw_index_B: torch.Tensor | None = None
    group_size: int | None = None

    def __len__(self) -> int:
        return self.index_B.numel()

    @property
    def keys(self) -> list[str]:
        return [sample_key(index) for index in self.index_B.tolist()]

    def draw_keys(self, *, seed: int, view: int) -> DrawKeys:
        """Return the keys of all draws for one view of the samples."""
        if self.draw_index_B is None:
            return DrawKeys(seed=seed, epoch=self.epoch, index_B=self.index_B, view=view, step=self.step)
        return DrawKeys(seed=seed, epoch=0, index_B=self.draw_index_B, view=view, step=self.step)

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory. `DataLoader(pin_memory=True)` calls it, for asynchronous copies."""
        return self._map(torch.Tensor.pin_memory)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device. The host waits only for a copy to itself, which could be read too early."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"))

    def copy(self) -> Batch:
        """Return a batch in new memory."""
        return self._map(torch.Tensor.clone)

    def tensors(self) -> list[torch.Tensor]:
        """Return each tensor once, in a fixed order: if both views share their input, it comes once."""
        inputs_b = None if self.inputs_b is self.inputs_a else self.inputs_b
        masks_b_BHW = None if self.masks_b_BHW is self.masks_BHW else self.masks_b_BHW
        own = (self.index_B, self.inputs_a, inputs_b, self.masks_BHW, masks_b_BHW, self.draw_index_B)
        return [tensor for tensor in (*own, *self.labels.values()) if tensor is not None]

    def part(self, number: int, num_parts: int) -> Batch:
        """Return the rows `number`, `number + num_parts`, ...; only the first part keeps `bad`.

        If `num_parts` divides the number of rows on each rank, a part holds the same rows of the global batch for any
        number of ranks.
        """
        part = self._map(lambda tensor: tensor[number::num_parts])
        return part if number == 0 else replace(part, bad=())

    def _map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        inputs_a = move(self.inputs_a)
        masks_BHW = None if self.masks_BHW is None else move(self.masks_BHW)
        masks_b_BHW = masks_BHW
        if self.masks_b_BHW is not None and self.masks_b_BHW is not self.masks_BHW:
            masks_b_BHW = move(self.masks_b_BHW)
        return replace(
            self,
            index_B=move(self.index_B),
            inputs_a=inputs_a,
            inputs_b=inputs_a if self.inputs_b is self.inputs_a else move(self.inputs_b),
            masks_BHW=masks_BHW,
            masks_b_BHW=masks_b_BHW,
            labels={name: move(label_B) for name, label_B in self.labels.items()},
            draw_index_B=None if self.draw_index_B is None else move(self.draw_index_B),
        )
