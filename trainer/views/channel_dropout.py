"""Channel dropout: views lose whole channels of a picture, by default the same ones in all views of a step.

An objective compares samples by what tells them apart soonest. If each view loses channels of its own, the easy feature
still tells many pairs apart. If a step loses a channel in all views, no sample of this step can be told from another
one by it, so the encoder learns from the other channels. The draws are blind: nothing says which channel is easy.

As a layer between features, it is SpatialDropout (Tompson et al. 2015), where each sample loses channels of its own.

Legend: B samples, C channels, H rows, W columns; D draws, one for each view or one for all.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from torch import Tensor, nn

from data_pipeline.core.counter_rng import DrawKeys, uniform
from data_pipeline.core.schema import Ascending, Share
from trainer.views.inputs import check_pictures
from trainer.views.policy import BaseViewsConfig, ViewsInputs

_PURPOSE: Final = 0  # `purpose` in `data_pipeline.core.counter_rng`


class ChannelDropoutConfig(BaseViewsConfig):
    """The config of channel dropout.

    rate: the lowest and the highest probability of a channel to be lost. Each draw takes a probability between them,
        and draws the channels by it. One channel always stays: if all would be lost, a random one. Few channels make
        the encoder learn from each of them; many channels are like the whole picture, which a probe reads.
    shared: "step" draws once for all samples and both views of a step, on all ranks; "view" draws for each view of
        each sample. Where there is no step, as in a probe on views or an analysis, "step" draws for each sample, the
        same for both its views.
    """

    kind: Literal["channel_dropout"] = "channel_dropout"
    rate: Annotated[tuple[Share, Share], Ascending] = (0.5, 1.0)
    shared: Literal["step", "view"] = "step"

    def build(self, given: ViewsInputs) -> ChannelDropout:
        return ChannelDropout(self)

    def check_channels(self, num_channels: int) -> None:
        if num_channels < 2:
            raise ValueError(
                f'views of kind "{self.kind}" lose some channels of a picture and keep others, but pictures have '
                f"{num_channels} channel; use other views"
            )


class ChannelDropout(nn.Module):
    """The view policy of channel dropout: a module `policy(images_BCHW, keys, masks_BHW) -> views_BCHW`.

    It has no parameters, and its draws depend on `keys` alone.
    """

    def __init__(self, config: ChannelDropoutConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, images_BCHW: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        """Return one view of each picture, in which lost channels are 0, with the shape and dtype of the pictures."""
        check_pictures(images_BCHW, keys)
        C = images_BCHW.shape[1]
        self.config.check_channels(C)
        own_keys = keys.of_step() if self.config.shared == "step" else keys
        keep_DC = draw_kept(self.config, own_keys, num_channels=C)
        return images_BCHW * keep_DC[:, :, None, None].to(images_BCHW.dtype)


def draw_kept(config: ChannelDropoutConfig, keys: DrawKeys, *, num_channels: int) -> Tensor:
    """Draw (D, C) bool for D keys: whether each of the C channels stays."""
    numbers_DN = uniform(keys, num_channels + 1, purpose=_PURPOSE)
    numbers_DC, rate_D1 = numbers_DN[:, :-1], numbers_DN[:, -1:]
    lowest, highest = config.rate
    stays_DC = numbers_DC == numbers_DC.amax(dim=1, keepdim=True)  # so that one does
    return stays_DC | (numbers_DC >= lowest + (highest - lowest) * rate_D1)
