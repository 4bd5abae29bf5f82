"""Cut the crops of expert views out of the original pictures of tars, when they are decoded.

A picture of 500 x 400 pixels then gives a crop its full resolution, and only what the crop needs is decoded. The boxes
are those that the view policy would draw, from the same (seed, epoch, sample index, view), so a view is a pure function
of these. The policy makes the rest of the view.

An overlay is drawn on the square to which a picture is brought, and belongs into the crop. So crops of tars with an
overlay are cut out of the squares.
"""

from __future__ import annotations

from data_pipeline.core.random_crop import CropLaw
from trainer.config import RunConfig
from trainer.mixture import TrainManifest


def original_crops(config: RunConfig, train: TrainManifest) -> CropLaw | None:
    """Return how crops are drawn when pictures are decoded; None if pictures are decoded whole."""
    is_whole = config.data.crop_from == "decoded" or config.objective.takes_samples
    if train.is_online or not train.any_size or is_whole:
        return None
    return config.views.crop_law()
