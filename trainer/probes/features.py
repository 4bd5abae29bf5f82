"""What probes and analyses read from: every picture of a dataset in memory, and the features of a frozen encoder.

Shapes: N pictures, B batch, C channels, H height, W width, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from data_pipeline.manifest import Manifest, load_manifest
from data_pipeline.stream import read_all
from data_pipeline.counter_rng import DrawKeys

LabelSpace = Literal["base", "overlay"]
LABEL_SPACES: tuple[LabelSpace, ...] = ("base", "overlay")


class FeatureEncoder(Protocol):
    """What is asked of an encoder (`trainer.models.encoder.Encoder`); it normalises its input itself."""

    def features(self, views_BCHW: Tensor, /) -> Tensor: ...
    def pooled(self, views_BCHW: Tensor, /) -> Tensor: ...
    def train(self, mode: bool = True) -> object: ...
    def eval(self) -> object: ...


class ViewFunction(Protocol):
    """What is asked of a view policy: pictures (B, C, H, W) float32 in [0, 1] to views of the same shape."""

    def __call__(self, images_BCHW: Tensor, keys: DrawKeys, /) -> Tensor: ...


@dataclass(frozen=True)
class Pictures:
    """Every sample of a dataset once, in stored order, on the host.

    Attributes:
        manifest: of the dataset.
        images_NCHW, masks_NHW: uint8.
        index_N, label_base_N, label_overlay_N: int64.
    """

    manifest: Manifest
    images_NCHW: Tensor
    masks_NHW: Tensor
    index_N: Tensor
    label_base_N: Tensor
    label_overlay_N: Tensor

    def __len__(self) -> int:
        return self.index_N.numel()

    def labels(self, space: LabelSpace) -> Tensor:
        return self.label_base_N if space == "base" else self.label_overlay_N

    def class_names(self, space: LabelSpace) -> tuple[str, ...]:
        """Empty for `overlay` where nothing was drawn."""
        return self.manifest.label_names.base if space == "base" else self.manifest.label_names.overlay


def read_pictures(directory: Path) -> Pictures:
    """Read a whole dataset; 50,000 pictures of 32x32 are 205 MB. Raises `UserError` if `directory` is not a dataset."""
    manifest = load_manifest(directory)
    batches = list(read_all(directory, batch_size=1024))
    return Pictures(
        manifest=manifest,
        images_NCHW=torch.cat([batch.images_BCHW for batch in batches]),
        masks_NHW=torch.cat([batch.masks_BHW for batch in batches]),
        index_N=torch.cat([batch.index_B for batch in batches]),
        label_base_N=torch.cat([batch.label_base_B for batch in batches]),
        label_overlay_N=torch.cat([batch.label_overlay_B for batch in batches]),
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
