"""Make batches of decoded samples: crop sounds to one length, then apply the online overlay.

Every crop and overlay is drawn from (seed, epoch, sample index, view). A batch therefore does not depend on where its
samples were decoded, or on the number of workers.

Shapes: B batch, T points of a sound, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.audio.waveform import crop_last, gather_clips, to_float
from data_pipeline.core.batch import Batch
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.random_crop import CropLaw
from data_pipeline.core.sample import NO_LABEL, BadSample
from data_pipeline.loading.decode import Crops, DecodedSamples, draw_crops
from data_pipeline.overlays import Overlay, no_mask
from data_pipeline.storage.manifest import Manifest


@dataclass(frozen=True)
class BatchMaker:
    """The steps from decoded samples to a finished batch.

    Attributes:
        manifest: the manifest of the dataset.
        overlay: the online overlay, on the device where `apply_overlay` runs; None if there is none.
        keys: a function that returns the keys of all draws for (index_B, epoch, view).
        per_view: whether each view of a sample has its own crop and overlay. If not, the two views share them.
        crops: how a crop of a picture is drawn for each view; None if pictures are whole.
    """

    manifest: Manifest
    overlay: Overlay | None
    keys: Callable[[Tensor, int, int], DrawKeys]
    per_view: bool = False
    crops: CropLaw | None = None

    def crop_draws(self, indices: NDArray[np.int64], *, epoch: int) -> Crops | None:
        """Return how the crops of samples are drawn when they are decoded; None if they are decoded whole."""
        if self.crops is None:
            return None
        index_B = torch.from_numpy(indices)
        return partial(draw_crops, self.crops, [self.keys(index_B, epoch, view) for view in (0, 1)])

    def collate(
        self, samples: DecodedSamples, *, step: int = 0, epoch: int = 0, bad: tuple[BadSample, ...] = ()
    ) -> Batch:
        """Return a batch without the online overlay: inputs of one size, in the stored dtype, on the same device."""
        inputs_a = inputs_b = samples.pictures_BCHW
        if inputs_a is None or inputs_b is None:
            inputs_a = inputs_b = self._crop(samples, epoch=epoch, view=0)
            if self.per_view and samples.longest > inputs_a.shape[1]:
                inputs_b = self._crop(samples, epoch=epoch, view=1)
        elif samples.pictures_b_BCHW is not None:
            inputs_b = samples.pictures_b_BCHW
        return Batch(
            step=step,
            epoch=epoch,
            index_B=samples.index_B,
            inputs_a=inputs_a,
            inputs_b=inputs_b,
            masks_BHW=samples.masks_BHW,
            masks_b_BHW=samples.masks_BHW,
            labels=samples.labels,
            bad=bad,
        )

    def _crop(self, samples: DecodedSamples, *, epoch: int, view: int) -> Tensor:
        """Return waveforms (B, T): the first T points in a test split, the first or last T points in a train split."""
        assert samples.points_X is not None
        assert samples.start_B is not None
        assert samples.length_B is not None
        last_B = torch.zeros_like(samples.index_B, dtype=torch.bool)
        if self.manifest.how_made.split == "train":
            last_B = crop_last(self.keys(samples.index_B, epoch, view))
        (num_points,) = self.manifest.input_shape
        return gather_clips(samples.points_X, samples.start_B, samples.length_B, num_points, last_B=last_B)

    @torch.no_grad()
    def apply_overlay(self, clean: Batch) -> Batch:
        """Return the finished batch of one from `collate`: with the online overlay, sounds as float32, and masks."""
        inputs_a, inputs_b = clean.inputs_a, clean.inputs_b
        is_sound = self.manifest.medium == "sound"
        if is_sound and inputs_a.dtype != torch.float32:
            inputs_a = to_float(clean.inputs_a)
            inputs_b = inputs_a if clean.inputs_b is clean.inputs_a else to_float(clean.inputs_b)
        if self.overlay is not None:
            view_a = view_b = self.overlay(inputs_a, self.keys(clean.index_B, clean.epoch, 0), clean.labels)
            if self.per_view:
                view_b = self.overlay(inputs_b, self.keys(clean.index_B, clean.epoch, 1), clean.labels)
            return replace(
                clean,
                inputs_a=view_a.inputs,
                inputs_b=view_b.inputs,
                masks_BHW=view_a.masks_BHW,
                masks_b_BHW=view_b.masks_BHW,
                labels={**clean.labels, **view_a.labels},
            )
        masks_BHW = no_mask(inputs_a) if clean.masks_BHW is None and not is_sound else clean.masks_BHW
        return replace(clean, inputs_a=inputs_a, inputs_b=inputs_b, masks_BHW=masks_BHW, masks_b_BHW=masks_BHW)


def join_parts(
    parts: Sequence[Batch], row_B: Tensor, *, epoch: int, num_samples: int, label_names: Sequence[str]
) -> Batch:
    """Return one batch of the rows of finished `parts`, put end to end and then taken in the order `row_B`.

    The parts come from the sources of a mixture, which hold `num_samples` samples together and may have different
    labels. `label_names` are the labels of all sources, also of sources without a row here, so that every batch of
    every rank has the same labels. `index_B` of a part holds its draw indices. `epoch` is the epoch of the mixture.
    """

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors)).index_select(0, row_B)

    whole: dict[str, Any] = {}
    for name in (each.name for each in fields(Batch)):
        values = [getattr(part, name) for part in parts]
        if all(isinstance(value, Tensor) for value in values):
            whole[name] = joined(values)
    if all(part.inputs_b is part.inputs_a for part in parts):
        whole["inputs_b"] = whole["inputs_a"]
    if all(part.masks_b_BHW is part.masks_BHW for part in parts):
        whole["masks_b_BHW"] = whole.get("masks_BHW")
    missing = [torch.full_like(part.index_B, NO_LABEL) for part in parts]
    draw_index_B = whole.pop("index_B")
    stages = sorted({stage for part in parts for stage in part.seconds})
    return replace(
        parts[0],
        **whole,
        epoch=epoch,
        index_B=draw_index_B % num_samples,
        draw_index_B=draw_index_B,
        labels={
            name: joined([part.labels.get(name, no) for part, no in zip(parts, missing, strict=True)])
            for name in label_names
        },
        bad=tuple(bad for part in parts for bad in part.bad),
        seconds={stage: sum(part.seconds.get(stage, 0.0) for part in parts) for stage in stages},
    )
