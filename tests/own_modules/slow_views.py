"""The default view policy with a pause of PAUSE_SECONDS in each step; see tests/slow_steps.py."""

from __future__ import annotations

import os
import time
from typing import Literal

from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys
from trainer.views.expert_image import ExpertImage, ExpertImageConfig
from trainer.views.policy import ViewsInputs


class SlowConfig(ExpertImageConfig):
    """The config of the default views under a name of its own."""

    kind: Literal["slow"] = "slow"  # type: ignore[assignment]

    def build(self, given: ViewsInputs) -> SlowViews:
        return SlowViews(self)


class SlowViews(ExpertImage):
    """The same views, bit for bit, after a pause."""

    def forward(self, images_BCHW: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        time.sleep(float(os.environ["PAUSE_SECONDS"]))
        return super().forward(images_BCHW, keys, masks_BHW)
