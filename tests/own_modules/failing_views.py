"""The default view policy, which raises KeyError in the second step of the rank FAILING_RANK, if there is one."""

from __future__ import annotations

import os
from typing import Literal

from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys
from trainer.distributed.collectives import rank
from trainer.views.expert_image import ExpertImage, ExpertImageConfig
from trainer.views.policy import ViewsInputs

_VIEWS_BEFORE = 2  # of the first step


class FailingConfig(ExpertImageConfig):
    """The config of the default views under a name of its own."""

    kind: Literal["failing"] = "failing"  # type: ignore[assignment]

    def build(self, given: ViewsInputs) -> FailingViews:
        return FailingViews(self)


class FailingViews(ExpertImage):
    """The same views, bit for bit, until they fail."""

    num_done = 0

    def forward(self, images_BCHW: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        if self.num_done == _VIEWS_BEFORE and os.environ.get("FAILING_RANK") == str(rank()):
            raise KeyError(f"a label that only rank {rank()} has")
        self.num_done += 1
        return super().forward(images_BCHW, keys, masks_BHW)
