"""The viewmaker: a network that learns to make views, bounded by a budget on how far it may change a picture.

Comes in: pictures in [0, 1] and the keys of their noise. Goes out: the pictures plus a perturbation whose mean size
per entry is the budget. The network is the one of Tamkin et al. (2021, "Viewmaker Networks") as used in "Feature
Dropout" (2022): a stem, residual blocks on a map a quarter as wide, two upsamplings; before the stem and before each
residual block a channel of uniform noise is appended. What may never happen: noise from ambient random state, or a
perturbation over budget.

Two convolutions are computed in another order than they are written in the paper, with equal results: see
`upsample_convolve` and `convolve_to_few_channels`.

Legend: B samples, C channels, H rows, W columns, I and O input and output channels, K kernel size.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from data_pipeline.counter_rng import DrawKeys, uniform
from data_pipeline.schema import Schema

_FIRST_NOISE_PURPOSE = 1


class ViewmakerConfig(Schema):
    """`budget` is the mean absolute change per entry of a picture in [0, 1].

    Width 32 is the published network (channels 32, 64, 128). The paper clamps views to [0, 1]; the published configs of
    the original code do not.
    """

    kind: Literal["viewmaker"] = "viewmaker"
    num_res_blocks: PositiveInt = 3
    budget: PositiveFloat = 0.05
    clamp: bool = True
    base_width: PositiveInt = 32


def project(r_BCHW: Tensor, *, budget: float) -> Tensor:
    """Squash `r` and scale it onto the sphere of perturbations that spend the budget: mean |delta| = budget.

    delta = budget * tanh(r) / (mean |tanh(r)| + 1e-4), with one mean for each sample, so the budget is never exceeded
    and short by a share of 1e-4 / (mean + 1e-4) only. Computed in float32 where `r` has less (Tamkin et al. 2021).
    """
    u_BCHW = torch.tanh(r_BCHW.to(torch.promote_types(r_BCHW.dtype, torch.float32)))
    return budget * u_BCHW / (u_BCHW.abs().mean(dim=(1, 2, 3), keepdim=True) + 1e-4)


def upsample_convolve(x_BIHW: Tensor, weight_OIKK: Tensor) -> Tensor:
    """Repeat every pixel 2 x 2, pad by one reflected pixel, convolve 3 x 3: (B, I, H, W) to (B, O, 2H, 2W).

    Done as one transposed convolution with stride 2 of the small map, whose 4 x 4 kernel sums the taps that meet the
    same small pixel: 16 products for four output pixels instead of 36. A reflected pixel of the large map repeats the
    edge of the small one.
    """
    wide_OIKK = F.pad(weight_OIKK, (1, 1, 1, 1))
    taps_OIKK = wide_OIKK[..., 1:, 1:] + wide_OIKK[..., 1:, :-1] + wide_OIKK[..., :-1, 1:] + wide_OIKK[..., :-1, :-1]
    padded_BIHW = F.pad(x_BIHW, (1, 1, 1, 1), mode="replicate")
    return F.conv_transpose2d(padded_BIHW, taps_OIKK.flip(2, 3).transpose(0, 1), stride=2, padding=3)


def convolve_to_few_channels(x_BIHW: Tensor, weight_OIKK: Tensor) -> Tensor:
    """Reflection-padded K x K convolution to the same size, for a handful of output channels.

    The K rows of the kernel become output channels of a 1 x K convolution, whose results are added, each shifted by its
    row: with 3 output channels a convolution leaves most of a processor's lanes empty, with 3 K it fills them.
    """
    num_out, num_in, K, _ = weight_OIKK.shape
    H = x_BIHW.shape[2]
    padded_BIHW = F.pad(x_BIHW, (K // 2,) * 4, mode="reflect")
    rows_BXHW = F.conv2d(padded_BIHW, weight_OIKK.permute(2, 0, 1, 3).reshape(K * num_out, num_in, 1, K))
    rows = torch.split(rows_BXHW, num_out, dim=1)
    y_BOHW = rows[0][:, :, :H]
    for shift in range(1, K):
        y_BOHW = y_BOHW + rows[shift][:, :, shift : shift + H]
    return y_BOHW


class ConvNorm(nn.Module):
    """Convolution (reflection padding) and instance norm with scale and shift, without running statistics.

    The norm subtracts whatever the convolution's bias adds. The published network has that bias, so it exists here, but
    it takes part with the weight 0: its gradient is exactly 0 and not the rounding error of 0, which Adam would blow up
    to full steps that differ from one number of ranks to the next.
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, kernel_size: int, resize: Literal["down", "up"] | None = None
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.norm = nn.InstanceNorm2d(out_channels, affine=True)
        self.resize = resize

    def forward(self, x_BCHW: Tensor) -> Tensor:
        weight, bias = self.conv.weight, self.conv.bias
        assert bias is not None
        if self.resize == "up":
            y_BCHW = upsample_convolve(x_BCHW, weight)
        else:
            padded_BCHW = F.pad(x_BCHW, (weight.shape[-1] // 2,) * 4, mode="reflect")
            y_BCHW = F.conv2d(padded_BCHW, weight, stride=2 if self.resize == "down" else 1)
        # One channel a group is instance norm; the kernel is twice as fast, if the map is contiguous.
        return F.group_norm(
            y_BCHW.contiguous(), y_BCHW.shape[1], self.norm.weight, self.norm.bias + 0 * bias, self.norm.eps
        )


class Residual(nn.Module):
    """x + norm(conv(relu(norm(conv(x))))), with nothing after the sum."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.first = ConvNorm(num_channels, num_channels, kernel_size=3)
        self.second = ConvNorm(num_channels, num_channels, kernel_size=3)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        change_BCHW: Tensor = self.second(F.relu(self.first(x_BCHW)))
        return x_BCHW + change_BCHW


class Viewmaker(nn.Module):
    """`viewmaker(images_BCHW, keys) -> views_BCHW`; the same keys give the same view, in training and in eval mode."""

    def __init__(self, config: ViewmakerConfig, *, image_channels: int) -> None:
        super().__init__()
        self.config = config
        width = config.base_width
        self.stem = nn.ModuleList(
            [
                ConvNorm(image_channels + 1, width, kernel_size=9),
                ConvNorm(width, 2 * width, kernel_size=3, resize="down"),
                ConvNorm(2 * width, 4 * width, kernel_size=3, resize="down"),
            ]
        )
        self.blocks = nn.ModuleList([Residual(4 * width + 1 + block) for block in range(config.num_res_blocks)])
        self.upsample = nn.ModuleList(
            [
                ConvNorm(4 * width + config.num_res_blocks, 2 * width, kernel_size=3, resize="up"),
                ConvNorm(2 * width, width, kernel_size=3, resize="up"),
            ]
        )
        self.out = nn.Conv2d(width, image_channels, 9)

    def forward(self, images_BCHW: Tensor, keys: DrawKeys) -> Tensor:
        """Views of pictures in [0, 1], same shape and type; clamped to [0, 1] after the budget if the config says so.

        Raises:
            ValueError: height or width is not a multiple of 4.
        """
        views_BCHW = images_BCHW + self.deltas(images_BCHW, keys)
        return views_BCHW.clamp(0, 1) if self.config.clamp else views_BCHW

    def deltas(self, images_BCHW: Tensor, keys: DrawKeys) -> Tensor:
        """The perturbations as they are added, before any clamp: mean absolute value the budget for each sample."""
        H, W = images_BCHW.shape[2:]
        if H % 4 or W % 4:
            raise ValueError(f"the viewmaker needs a height and width that are multiples of 4, got {H} x {W}")
        x_BCHW = append_noise(images_BCHW, keys, layer=0)
        for conv_norm in self.stem:
            x_BCHW = F.relu(conv_norm(x_BCHW))
        for layer, block in enumerate(self.blocks, start=1):
            x_BCHW = block(append_noise(x_BCHW, keys, layer=layer))
        for conv_norm in self.upsample:
            x_BCHW = F.relu(conv_norm(x_BCHW))
        assert self.out.bias is not None
        r_BCHW = convolve_to_few_channels(x_BCHW, self.out.weight) + self.out.bias[:, None, None]
        return project(r_BCHW, budget=self.config.budget)


def append_noise(x_BCHW: Tensor, keys: DrawKeys, *, layer: int) -> Tensor:
    """`x` with one more channel, of uniform noise in [0, 1) that depends on the keys and the layer alone."""
    B, _, H, W = x_BCHW.shape
    noise_BX = uniform(keys, H * W, purpose=_FIRST_NOISE_PURPOSE + layer)
    return torch.cat([x_BCHW, noise_BX.view(B, 1, H, W).to(x_BCHW.dtype)], dim=1)
