"""Expert views of pictures: crop, flip, colour jitter, grayscale and blur of a whole batch at once, or some of these.

The default policy is the usual one of contrastive learning (Chen et al. 2020) with the strengths of "Feature Dropout"
(Tamkin et al. 2022). `huang_views` returns the policies of Huang et al. (2023), which compare single and composed
transforms. Every operation means the same as torchvision's transform of that name, in floating point: nothing is
rounded to 256 levels between operations, unlike in a chain of PIL pictures. One exception: the aspect of a crop is
relative to that of the picture, which differs if the picture is not square.

`trainer.views.resampling` holds crop, flip and blur, and `trainer.views.colour` changes colours. An operation that the
config switches off is neither drawn nor computed, and the draws of the others do not change.

Colour jitter and grayscale need red, green and blue; the other operations take any number of channels.

Legend: B samples, C channels, H rows, W columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Annotated, Final, Literal, Self, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from data_pipeline.core.counter_rng import DrawKeys, uniform
from data_pipeline.core.random_crop import NUM_CROP_NUMBERS, CropLaw, between, crop_boxes
from data_pipeline.core.schema import Ascending, PositiveShare, Share
from trainer import triton_works
from trainer.triton_works import check_near, kernels
from trainer.views.colour import HUE, NUM_COLOURS, changes_any, jitter_colour_, luma
from trainer.views.inputs import check_pictures, rows_of, without_autocast
from trainer.views.policy import BaseViewsConfig, ViewsInputs
from trainer.views.resampling import blur, blur_, crop_and_flip, gaussian_blur_matrix, per_picture, pil_blur_matrix

Aspect = Annotated[float, Field(ge=0.01, le=100)]
Sigma = Annotated[float, Field(ge=0.01, le=1_000)]  # pixels; twice its square is a denominator

HUANG_LETTERS = "abcde"  # crop, blur, grayscale, jitter, flip: the letters of the paper's tables
_VALUES_ON_CPU: Final = 1 << 20  # of the pictures that one thread changes at once: 6 of 224 x 224, 341 of 32 x 32
_SIMCLR_BLUR: Final = 20  # its kernel is a tenth of the picture wide, so a twentieth to either side

_DRAWS = {
    "crop": NUM_CROP_NUMBERS,  # first, so that `random_resized_crops` draws the same numbers alone
    "jitter": 1,
    "jitter_order": 4,
    "jitter_factors": 4,
    "grayscale": 1,
    "blur": 1,
    "sigma": 1,
    "flip": 1,
}
_PURPOSE = 0


class ExpertImageConfig(BaseViewsConfig):
    """The config of the five operations; a probability of 0 switches an operation off.

    `area` is the crop's share of the picture (None: no crop), and `aspect` its width / height, log-uniform. In pictures
    that are not square, the aspect is relative to that of the picture: 1 is a box of its shape.
    `brightness`, `contrast`, `saturation` and `hue` are the strengths of torchvision's ColorJitter.

    `blur`: "pil", as published by Tamkin et al. (2022), is PIL's GaussianBlur without its rounding. "gaussian" has the
    weights of a true Gaussian at whole pixels, which blurs less below a sigma of 0.5. "simclr" cuts that off beyond a
    twentieth of the picture to either side (Chen et al. 2020, who put zeros beyond the edge; here edge pixels are
    repeated). These three draw sigma, in pixels, uniformly from `blur_sigma`. "constant" is PIL's blur with radius 1:
    the published code of Huang et al. (2023) draws a radius of 1.28 to 1.92 for pictures of 32 pixels, but rounds it
    down.
    """

    kind: Literal["expert_image"] = "expert_image"
    area: Annotated[tuple[PositiveShare, PositiveShare], Ascending] | None = (0.2, 1.0)
    aspect: Annotated[tuple[Aspect, Aspect], Ascending] = (3 / 4, 4 / 3)
    jitter_probability: Share = 0.8
    brightness: Share = 0.4
    contrast: Share = 0.4
    saturation: Share = 0.4
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    grayscale_probability: Share = 0.2
    blur_probability: Share = 0.5
    blur: Literal["pil", "gaussian", "simclr", "constant"] = "pil"
    blur_sigma: Annotated[tuple[Sigma, Sigma], Ascending] = (0.1, 2.0)
    flip_probability: Share = 0.5

    @property
    def strengths(self) -> tuple[float, float, float, float]:
        return self.brightness, self.contrast, self.saturation, self.hue

    @property
    def jitters(self) -> bool:
        return self.jitter_probability > 0 and any(self.strengths)

    def build(self, given: ViewsInputs) -> ExpertImage:
        return ExpertImage(self)

    def check_channels(self, num_channels: int) -> None:
        changes_colours = self.jitters or self.grayscale_probability > 0
        if changes_colours and num_channels != NUM_COLOURS:
            raise ValueError(
                f"colour jitter and grayscale need pictures of {NUM_COLOURS} channels, got {num_channels}; set "
                "jitter_probability=0 and grayscale_probability=0 in these views"
            )

    def without_colours(self) -> Self:
        """Return the config of the same views without colour jitter and grayscale, for any number of channels."""
        return self.model_copy(update={"jitter_probability": 0.0, "grayscale_probability": 0.0})

    def crop_law(self) -> CropLaw | None:
        return None if self.area is None else CropLaw(scale=self.area, ratio=self.aspect, purpose=_PURPOSE)

    def without_crop(self) -> Self:
        return self.model_copy(update={"area": None})


def huang_views(letters: str, *, strength: float = 0.5, jitter_probability: float = 0.8) -> ExpertImageConfig:
    """Return the policy with some transforms of Huang et al. (2023), given by their letters in any order.

    - a: crop of 0.08 to 1 of the area
    - b: blur with probability 0.5, with a constant radius as in the published code
    - c: grayscale with probability 0.2
    - d: colour jitter; `strength` multiplies its strengths 0.8, 0.8, 0.8 and 0.2
    - e: flip with probability 0.5

    They are applied in the order a, e, d, c, b. The paper's table of colour strengths uses the letters "ad", a jitter
    probability of 1, and the strengths 1, 1/2, 1/4 and 1/8.

    Raises:
        ValueError: if there is another letter, a letter twice or no letter, or if the strength is not from 0 to 1.25.
    """
    if not letters or len(set(letters)) < len(letters) or not set(letters) <= set(HUANG_LETTERS):
        raise ValueError(f'the views must be one or more letters of "{HUANG_LETTERS}", each once, got "{letters}"')
    return ExpertImageConfig(
        area=(0.08, 1.0) if "a" in letters else None,
        jitter_probability=jitter_probability if "d" in letters else 0.0,
        brightness=0.8 * strength,
        contrast=0.8 * strength,
        saturation=0.8 * strength,
        hue=0.2 * strength,
        grayscale_probability=0.2 if "c" in letters else 0.0,
        blur_probability=0.5 if "b" in letters else 0.0,
        blur="constant",
        flip_probability=0.5 if "e" in letters else 0.0,
    )


# Both views equal the picture.
NO_VIEWS: Final = ExpertImageConfig(
    area=None, jitter_probability=0.0, grayscale_probability=0.0, blur_probability=0.0, flip_probability=0.0
)


@dataclass(frozen=True)
class ExpertDraws:
    """The random parameters of one view of each sample; None for an operation that is switched off.

    Attributes:
        box_B4: float32, top, left, height and width of the crop in whole pixels.
        flip_B, gray_B: bool.
        factor_B4, order_B4: the colour jitter, see `trainer.views.colour`.
        sigma_B: sigma of the blur, in pixels; 0 for a picture without blur.
        blur_matrix: a function that returns the weights of the blur along an axis, such as `pil_blur_matrix`.
    """

    box_B4: Tensor | None
    flip_B: Tensor | None
    factor_B4: Tensor | None
    order_B4: Tensor | None
    gray_B: Tensor | None
    sigma_B: Tensor | None
    blur_matrix: Callable[..., Tensor]


class ExpertImage(nn.Module):
    """The expert view policy: a module `policy(images_BCHW, keys, masks_BHW) -> views_BCHW` without parameters.

    Its draws depend on `keys` alone.
    """

    def __init__(self, config: ExpertImageConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, images_BCHW: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        """Return one view of each picture, (B, C, H, W) in [0, 1] like the pictures, not normalised.

        It is computed in float32, also under autocast, and returned in the dtype of the pictures. Pictures with a
        gradient get one, unless colours are jittered.
        """
        check_pictures(images_BCHW, keys)
        return self._views(images_BCHW.float(), keys).to(images_BCHW.dtype)

    def _views(self, images_BCHW: Tensor, keys: DrawKeys) -> Tensor:
        B, C, H, W = images_BCHW.shape
        self.config.check_channels(C)
        draws = draw(self.config, keys, size=(H, W))
        with without_autocast(images_BCHW.device):  # a crop in bfloat16 would lose shades
            if images_BCHW.device.type != "cpu" or images_BCHW.requires_grad:
                return self.apply_draws(images_BCHW, draws)
            # Threads wait for each other after each operation, so several threads get more at a time.
            threads = torch.get_num_threads()
            size = max(1, _VALUES_ON_CPU * (1 if threads == 1 else 16 * threads) // (C * H * W))
            if size >= B:
                return self.apply_draws(images_BCHW, draws)
            # A few at a time, so that their numbers stay in the cache. The bits are those of the whole batch.
            views_BCHW = torch.empty_like(images_BCHW, memory_format=torch.contiguous_format)
            for first in range(0, B, size):
                rows = slice(first, first + size)
                views_BCHW[rows] = self.apply_draws(images_BCHW[rows], rows_of(draws, rows))
            return views_BCHW

    def apply_draws(self, images_BCHW: Tensor, draws: ExpertDraws) -> Tensor:
        """Return the views with these parameters, (B, C, H, W) float32 in [0, 1] like the pictures, in new memory.

        The order is crop, flip, jitter, grayscale, blur. The published code of the default policy flips last, with the
        same result: a flip commutes with everything except the crop. A blur commutes with grayscale, but not with the
        jitter, which clamps.

        On a CPU, the host reads the draws, and leaves out what changes no picture. On other devices it reads nothing.
        Kernels in Triton do the same on a GPU, up to rounding, if the pictures need no gradient.
        """
        if module := _kernels(images_BCHW):
            return cast("Tensor", module.views(images_BCHW, draws))
        x_BCHW = crop_and_flip(images_BCHW, draws.box_B4, draws.flip_B)
        if draws.factor_B4 is not None and draws.order_B4 is not None:
            jitter_colour_(x_BCHW, draws.factor_B4, draws.order_B4)
        if draws.gray_B is not None and changes_any(draws.gray_B):
            x_BCHW.lerp_(luma(x_BCHW), per_picture(draws.gray_B.to(x_BCHW.dtype)))
        if draws.sigma_B is None:
            return x_BCHW
        return (blur_ if x_BCHW.device.type == "cpu" else blur)(x_BCHW, draws.sigma_B, draws.blur_matrix)


def draw(config: ExpertImageConfig, keys: DrawKeys, *, size: int | tuple[int, int]) -> ExpertDraws:
    """Draw the parameters of one view for each key. `size` is height and width, or one number for both."""
    height, width = (size, size) if isinstance(size, int) else size
    low, high = config.aspect
    aspect = config.aspect if height == width else (low * width / height, high * width / height)
    limits = (1.0, 1.0) if config.blur == "constant" else config.blur_sigma
    blur_matrix: Callable[..., Tensor] = pil_blur_matrix
    if config.blur in ("gaussian", "simclr"):
        reach = min(height, width) // _SIMCLR_BLUR if config.blur == "simclr" else None
        blur_matrix = partial(gaussian_blur_matrix, reach=reach)
    if module := _kernels(keys.index_B):
        drawn = module.drawn(config, keys, height=height, width=width, aspect=aspect, sigma=limits)
        return ExpertDraws(**drawn, blur_matrix=blur_matrix)
    numbers = torch.split(uniform(keys, sum(_DRAWS.values()), purpose=_PURPOSE), list(_DRAWS.values()), dim=1)
    u = dict(zip(_DRAWS, numbers, strict=True))

    box_B4 = flip_B = factor_B4 = order_B4 = gray_B = sigma_B = None
    if config.area is not None:
        # Without a copy from the host, for which a GPU would wait.
        sizes_12 = height + (width - height) * torch.arange(2, device=u["crop"].device)[None]
        box_B4 = crop_boxes(u["crop"], sizes_12, scale=config.area, ratio=aspect)
    if config.flip_probability:
        flip_B = u["flip"][:, 0] < config.flip_probability
    if config.jitters:
        factor_B4 = (2 * u["jitter_factors"] - 1) * (u["jitter"] < config.jitter_probability)
        for number, strength in enumerate(config.strengths):
            factor_B4[:, number].mul_(strength)
        factor_B4[:, :HUE].add_(1)
        order_B4 = u["jitter_order"].argsort(dim=1, stable=True)
    if config.grayscale_probability:
        gray_B = u["grayscale"][:, 0] < config.grayscale_probability
    if config.blur_probability:
        sigma_B = between(limits, u["sigma"])[:, 0] * (u["blur"][:, 0] < config.blur_probability)
    return ExpertDraws(box_B4, flip_B, factor_B4, order_B4, gray_B, sigma_B, blur_matrix)


def _kernels(inputs: Tensor) -> ModuleType | None:
    """Return the module of kernels if inputs are on a GPU and need no gradient, and it works here; otherwise None."""
    if inputs.requires_grad:
        return None
    return kernels("trainer.views.expert_image_kernels", inputs.device, torch.float32, _try_out)


def _try_out(_: ModuleType, dtype: torch.dtype) -> None:
    """Compare the default views of some pictures with those of a CPU."""
    policy = ExpertImage(ExpertImageConfig())
    images_BCHW = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=dtype)
    keys = DrawKeys(seed=0, epoch=0, index_B=torch.arange(8), view=0)
    on_gpu = dataclasses.replace(keys, index_B=keys.index_B.to(triton_works.DEVICE))
    check_near([policy(images_BCHW.to(triton_works.DEVICE), on_gpu)], [policy(images_BCHW, keys)])
