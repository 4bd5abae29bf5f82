"""Draw what the view policy does during training, for W&B and TensorBoard, as a grid and as a histogram.

The samples come from the test set and are always the same. Guarantees: no weight, gradient, mode or random state of
training changes.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torch import nn

from trainer.data import DataConfig
from trainer.observability.tracking import StepPictures, TrackingConfig, uses_wandb
from trainer.probes.features import read_some

NUM_SHOWN, NUM_MEASURED = 8, 64


def step_pictures(
    config: TrackingConfig, view_policy: nn.Module, *, data: DataConfig, seed: int, device: torch.device
) -> Callable[[int], StepPictures | None]:
    """Return a function that takes the number of steps done, and returns the pictures to log then, or None.

    Reads the samples at once, if the config asks for pictures. Raises `UserError` if they cannot be read.
    """
    every = config.pictures_every_steps
    if every is None or not (uses_wandb(config) or config.tensorboard):
        return lambda completed: None
    # Imported here, because matplotlib takes half a second and only the first rank needs it.
    from trainer.observability.view_grid import choose_pictures, draw_views, view_grid

    some = read_some(data.test_dir, num=NUM_MEASURED, read=data)
    shown, measured = choose_pictures(some, NUM_SHOWN), torch.arange(len(some))

    def pictures(completed: int) -> StepPictures | None:
        if completed % every:
            return None
        png, _ = view_grid(view_policy, some, shown, seed=seed, device=device)
        picture_NCHW, view_NCHW = draw_views(view_policy, some, measured, seed=seed, view=0, device=device)
        grid_HWC = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
        change_N = (view_NCHW - picture_NCHW).abs().flatten(1).mean(1).float().numpy()
        return StepPictures({"views/grid": grid_HWC}, {"views/change": change_N})

    return pictures
