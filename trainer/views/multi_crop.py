"""Multi-crop views: two large crops of each picture, and several small ones in fewer pixels (Caron et al. 2020, 2021).

The two global views are the first two views of a step, as of every policy. The local views are its further views: the
same picture seen through a smaller window, which takes the encoder a fraction of the time.

A local view is an expert view of the whole picture, brought to fewer pixels with antialiasing. The papers crop to the
smaller size at once, and blur then; here the blur comes first.

Legend: B samples, C channels, H rows, W columns, S rows and T columns of a local view.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.schema import ImageSize
from trainer.views.expert_image import ExpertImageConfig
from trainer.views.inputs import without_autocast
from trainer.views.policy import BaseViewsConfig, ViewsInputs


class MultiCropConfig(BaseViewsConfig):
    """The config of multi-crop views. The numbers of crops and their areas are those of Caron et al. (2021).

    global_views, local_views: the expert views of each kind.
    num_local: the number of local views of a sample.
    local_size: the rows of a local view, whose columns are in proportion to the picture's. None means half of the rows.
    """

    kind: Literal["multi_crop"] = "multi_crop"
    global_views: ExpertImageConfig = ExpertImageConfig(area=(0.4, 1.0))
    local_views: ExpertImageConfig = ExpertImageConfig(area=(0.05, 0.4))
    num_local: Annotated[int, Field(ge=1, le=64)] = 8
    local_size: ImageSize | None = None

    @property
    def num_further(self) -> int:
        return self.num_local

    def further_size(self, *, height: int, width: int) -> tuple[int, int]:
        rows = self.local_size or height // 2
        return rows, max(1, round(rows * width / height))

    def build(self, given: ViewsInputs) -> MultiCrop:
        return MultiCrop(self, given)

    def check_image_size(self, *, height: int, width: int) -> None:
        if self.local_size is not None and self.local_size > height:
            raise ValueError(
                f"views.local_size is {self.local_size}, but the pictures have {height} x {width} pixels; set it to "
                f"{height} or less"
            )

    def check_channels(self, num_channels: int) -> None:
        self.global_views.check_channels(num_channels)
        self.local_views.check_channels(num_channels)


class MultiCrop(nn.Module):
    """The view policy of multi-crop, without parameters: `policy(images_BCHW, keys, masks_BHW)` gives a global view.

    All draws depend on `keys` alone.
    """

    def __init__(self, config: MultiCropConfig, given: ViewsInputs) -> None:
        super().__init__()
        self.config = config
        self.of_globals = config.global_views.build(given)
        self.of_locals = config.local_views.build(given)

    def forward(self, images_BCHW: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        """Return a global view of each picture, as `ExpertImage` does."""
        views_BCHW: Tensor = self.of_globals(images_BCHW, keys)
        return views_BCHW

    def further_view(self, images_BCHW: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        """Return a local view of each picture, (B, C, S, T) in [0, 1]."""
        views_BCHW: Tensor = self.of_locals(images_BCHW, keys)
        height, width = images_BCHW.shape[-2:]
        size = self.config.further_size(height=height, width=width)
        with without_autocast(images_BCHW.device):
            # Weights of antialiasing are positive and add up to 1; the clamp is for their rounding.
            return F.interpolate(views_BCHW, size=size, mode="bilinear", antialias=True).clamp_(0, 1)
