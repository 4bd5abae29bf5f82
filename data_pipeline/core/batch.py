"""The batch that training gets: one rank's part of the samples of a step.

Shapes: B batch, C channels, H height, W width, T points of a waveform.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.sample import BadSample, sample_key


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
        masks_BHW, masks_b_BHW: (B, H, W) uint8, the masks of `inputs_a` and `inputs_b` in the levels of
            `data_pipeline.core.sample`; None for sounds, and zeros if nothing was drawn.
        labels: each label of the dataset by name, (B,) int64; `NO_LABEL` for a sample without it. Those of an overlay
            are of `inputs_a`.
        bad: samples of this rank's part that could not be read and were replaced.
        seconds: time that each stage of making the batch took: "read", "decode", "overlay", "transfer".
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
        values = [value for value in (*vars(self).values(), *self.labels.values()) if isinstance(value, torch.Tensor)]
        return list({id(tensor): tensor for tensor in values}.values())

    def part(self, number: int, num_parts: int) -> Batch:
        """Return the rows `number`, `number + num_parts`, ...; only the first part keeps `bad`.

        If `num_parts` divides the number of rows on each rank, a part holds the same rows of the global batch for any
        number of ranks.
        """
        part = self._map(lambda tensor: tensor[number::num_parts])
        return part if number == 0 else replace(part, bad=())

    def _map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return the batch with every tensor moved, each once: if both views share their input, they still do."""
        moved = {id(tensor): move(tensor) for tensor in self.tensors()}
        own: dict[str, Any] = {
            name: moved[id(value)] for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        labels = {name: moved[id(label_B)] for name, label_B in self.labels.items()}
        return replace(self, labels=labels, **own)
