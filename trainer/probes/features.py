"""What probes and analyses read from: every picture of a dataset in memory, and the features of a frozen encoder.

Shapes: N pictures, B batch, C channels, H height, W width, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from data_pipeline.counter_rng import DrawKeys
from data_pipeline.errors import UserError
from data_pipeline.manifest import Manifest
from data_pipeline.overlays import Overlay, evaluation_keys
from data_pipeline.store import SampleStore
from data_pipeline.stream import ReadConfig, read_all

LabelSpace = Literal["base", "overlay"]
LABEL_SPACES: tuple[LabelSpace, ...] = ("base", "overlay")
_DEFAULT_READ = ReadConfig()


class FeatureEncoder(Protocol):
    """What is asked of an encoder (`trainer.models.encoder.Encoder`); it normalises its input itself."""

    def features(self, views_BCHW: Tensor, /) -> Tensor: ...
    def pooled(self, views_BCHW: Tensor, /) -> Tensor: ...
    def train(self, mode: bool = True) -> object: ...
    def eval(self) -> object: ...


class ViewFunction(Protocol):
    """What is asked of a view policy: pictures (B, C, H, W) float32 in [0, 1], with their masks, to views of the same
    shape.
    """

    def __call__(self, images_BCHW: Tensor, keys: DrawKeys, masks_BHW: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class PictureBatch:
    """Pictures (B, C, H, W) and masks (B, H, W) uint8, and their labels (B,) int64, on the host."""

    images_BCHW: Tensor
    masks_BHW: Tensor
    labels: Mapping[LabelSpace, Tensor]


@dataclass(frozen=True)
class OnlinePictures:
    """Pictures (N, C, H, W) uint8 as they are stored, and the overlay that is drawn on them when they are read."""

    clean_NCHW: Tensor
    overlay: Overlay


@dataclass(frozen=True)
class Pictures:
    """Every sample of a dataset once, in stored order, on the host.

    Where the overlay is online, `images_NCHW`, masks and labels are of one draw, the same in every run, and `redraw`
    gives others.

    Attributes:
        manifest: of the dataset.
        images_NCHW, masks_NHW: uint8.
        index_N, label_base_N, label_overlay_N: int64.
        online: the overlay, and the pictures (N, C, H, W) without it; None where it is baked in or there is none.
    """

    manifest: Manifest
    images_NCHW: Tensor
    masks_NHW: Tensor
    index_N: Tensor
    label_base_N: Tensor
    label_overlay_N: Tensor
    online: OnlinePictures | None = None

    def __len__(self) -> int:
        return self.index_N.numel()

    def redraw(self, row_B: Tensor, keys: Callable[[Tensor], DrawKeys]) -> PictureBatch:
        """Some rows, with a new overlay where it is online: drawn from `keys(index_B)`."""
        labels: dict[LabelSpace, Tensor] = {space: self.labels(space)[row_B] for space in LABEL_SPACES}
        if self.online is None:
            return PictureBatch(self.images_NCHW[row_B], self.masks_NHW[row_B], labels)
        drawn = self.online.overlay(self.online.clean_NCHW[row_B], keys(self.index_N[row_B]))
        assert drawn.masks_BHW is not None
        return PictureBatch(drawn.inputs, drawn.masks_BHW, labels | {"overlay": drawn.label_B})

    def labels(self, space: LabelSpace) -> Tensor:
        return self.label_base_N if space == "base" else self.label_overlay_N

    def class_names(self, space: LabelSpace) -> tuple[str, ...]:
        """Empty for `overlay` where nothing was drawn."""
        return self.manifest.label_names.base if space == "base" else self.manifest.label_names.overlay


def read_pictures(location: Path | str, *, read: ReadConfig = _DEFAULT_READ, draw: int = 0) -> Pictures:
    """Read a whole dataset; 50,000 pictures of 32x32 are 205 MB, twice that where the overlay is online.

    `draw` numbers the draws of an online overlay, all of them the same in every run. Raises `UserError` where there is
    no dataset, or one of sounds.
    """
    store = SampleStore(location, remote=read.remote)
    if store.manifest.medium == "sound":
        raise UserError(f"{location} holds sounds; this reads pictures")
    batches = list(read_all(location, batch_size=1024, draw=None, remote=read.remote, max_bad_share=read.max_bad_share))
    clean_NCHW, index_N = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("inputs_a", "index_B"))
    label_base_N, label_overlay_N, masks_NHW = (
        torch.cat([getattr(batch, name) for batch in batches])
        for name in ("label_base_B", "label_overlay_B", "masks_BHW")
    )
    images_NCHW = clean_NCHW
    if store.overlay is not None:
        drawn = [
            store.overlay(clean_BCHW, evaluation_keys(index_B, draw=draw))
            for clean_BCHW, index_B in zip(torch.split(clean_NCHW, 1024), torch.split(index_N, 1024), strict=True)
        ]
        images_NCHW = torch.cat([part.inputs for part in drawn])
        label_overlay_N, masks_NHW = (
            torch.cat([part.label_B for part in drawn]),
            torch.cat([part.masks_BHW for part in drawn]),
        )
    return Pictures(
        manifest=store.manifest,
        images_NCHW=images_NCHW,
        masks_NHW=masks_NHW,
        index_N=index_N,
        label_base_N=label_base_N,
        label_overlay_N=label_overlay_N,
        online=None if store.overlay is None else OnlinePictures(clean_NCHW, store.overlay),
    )


@contextmanager
def frozen(*modules: object) -> Iterator[None]:
    """No gradients, and every module in eval mode; what was in train mode is so again afterwards."""
    parts = [part for module in modules if isinstance(module, nn.Module) for part in module.modules()]
    training = [part.training for part in parts]
    try:
        with torch.no_grad():
            for part in parts:
                part.training = False
            yield
    finally:
        for part, mode in zip(parts, training, strict=True):
            part.training = mode


def extract(
    function: Callable[[Tensor], Tensor], images_NCHW: Tensor, *, device: torch.device, batch_size: int = 128
) -> Tensor:
    """(N, F) features of uint8 pictures (N, C, H, W), without views: row i is of picture i, and of it alone if
    `function` treats pictures apart, as an encoder in eval mode does.
    """
    with torch.no_grad():
        return torch.cat([function(to_float(part, device)) for part in torch.split(images_NCHW, batch_size)])


def to_float(images_BCHW: Tensor, device: torch.device) -> Tensor:
    """uint8 pictures as float32 in [0, 1] on the device; they travel as bytes, a quarter of the size."""
    return images_BCHW.to(device).float() / 255
