"""Pictures of training for W&B and TensorBoard: what the view policy does at a step, as a grid and as a histogram.

Comes in: the policy in the middle of its training, and some test samples, the same each time. What may never happen: a
changed weight, gradient, mode or random state of training.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torch import nn

from trainer.config import RunConfig
from trainer.observability.tracking import StepPictures
from trainer.probes.features import read_some

NUM_SHOWN, NUM_MEASURED = 8, 64


def step_pictures(
    config: RunConfig, view_policy: nn.Module, *, device: torch.device
) -> Callable[[int], StepPictures | None]:
    """What the training loop of the first rank calls after each step, with the number of steps done; None where no
    pictures are due.

    Reads the samples here, if the config wants pictures. In float64, which is for comparing trajectories, there are
    none. Raises `UserError` where the samples cannot be had.
    """
    every = config.tracking.pictures_every_steps
    wanted = config.tracking.wandb != "disabled" or config.tracking.tensorboard
    if every is None or not wanted or config.precision == "float64":
        return lambda completed: None
    # Here, because other ranks draw nothing, and matplotlib takes half a second.
    from trainer.analyses.views import choose_pictures, draw_views, view_grid

    some = read_some(config.data.test_dir, num=NUM_MEASURED, read=config.data)
    shown, measured = choose_pictures(some, NUM_SHOWN), torch.arange(len(some))

    def pictures(completed: int) -> StepPictures | None:
        if completed % every:
            return None
        png, _ = view_grid(view_policy, some, shown, seed=config.seed, device=device)
        picture_NCHW, view_NCHW = draw_views(view_policy, some, measured, seed=config.seed, view=0, device=device)
        grid_HWC = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
        change_N = (view_NCHW - picture_NCHW).abs().flatten(1).mean(1).float().numpy()
        return StepPictures({"views/grid": grid_HWC}, {"views/change": change_N})

    return pictures
