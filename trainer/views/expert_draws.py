"""The random parameters of expert views of pictures.

Legend: B samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trainer.views.colour import JitterDraws
from trainer.views.resampling import CropDraws


@dataclass(frozen=True)
class ExpertDraws:
    """The random parameters of one view of each sample; None for an operation that is switched off.

    Attributes:
        crop, jitter: see their classes.
        flip_B, gray_B: bool.
        pil_sigma_B, sigma_B: sigma of PIL's blur and of the Gaussian blur, in pixels; 0 for a picture without blur.
        reach: pixels to either side beyond which the Gaussian blur is cut off; None: it is not.
        constant_blur_B: bool. At most one of the three blurs is not None.
    """

    crop: CropDraws | None
    flip_B: Tensor | None
    jitter: JitterDraws | None
    gray_B: Tensor | None
    pil_sigma_B: Tensor | None
    sigma_B: Tensor | None
    reach: int | None
    constant_blur_B: Tensor | None
