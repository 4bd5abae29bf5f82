"""The interface of a view policy, and the union of the policies there are: the union is the registry."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer.views.expert_image import ExpertImage, ExpertImageConfig
from trainer.views.viewmaker import Viewmaker, ViewmakerConfig

ViewsConfig = Annotated[ExpertImageConfig | ViewmakerConfig, Field(discriminator="kind")]
ViewPolicy = ExpertImage | Viewmaker

__all__ = ["ViewPolicy", "ViewsConfig", "build_view_policy"]


def build_view_policy(config: ViewsConfig, *, image_channels: int) -> ViewPolicy:
    """The policy a config names: an `nn.Module` called as `policy(images_BCHW, keys, masks_BHW=None) -> views_BCHW`.

    `masks_BHW` (uint8, the levels of `data_pipeline.sample`) are of the objects on these very pictures. Every policy
    takes them; only a masked viewmaker reads them, and raises `ValueError` where it gets none.
    """
    match config:
        case ExpertImageConfig():
            return ExpertImage(config)
        case ViewmakerConfig():
            return Viewmaker(config, image_channels=image_channels)
