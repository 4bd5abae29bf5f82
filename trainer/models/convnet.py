"""Build a plain convolutional network, without the classifier: the one of the RandBit experiment (Chen et al. 2021).

Shapes: B pictures, C channels, H by W pixels.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from torch import Tensor, nn

from data_pipeline.core.errors import UserError
from trainer.models.heads import set_keras_defaults
from trainer.models.trunk import ConvolutionalTrunk

_KERNEL: Final = 3
_STRIDE: Final = 2


class ConvNet(ConvolutionalTrunk):
    """Convolutions of 3x3 and stride 2 with `channels` outputs, and a dense layer that reads their whole map.

    No zeros are added around a map: 28 pixels become 13.
    Each layer is without bias and has a batch norm and a ReLU. Weights and batch norms begin as those of Keras. The
    dense layer returns a map of one pixel, (B, `dense_size`, 1, 1). `dense_size=None` leaves it out.

    Raises:
        ValueError: a dense layer has no `image_size` (height, width).
        UserError: the convolutions leave no pixel of such pictures.
    """

    def __init__(
        self,
        channels: Sequence[int],
        *,
        dense_size: int | None,
        image_size: tuple[int, int] | None,
        in_channels: int = 3,
    ) -> None:
        convolutions = [_convolution(*sizes) for sizes in pairwise((in_channels, *channels))]
        layers: OrderedDict[str, nn.Module] = OrderedDict(convolutions=nn.Sequential(*convolutions))
        if dense_size is not None:
            num_in = channels[-1] * _num_pixels(image_size, num_layers=len(channels))
            layers["dense"] = nn.Sequential(_dense(num_in, dense_size))
        super().__init__(layers, num_channels=dense_size or channels[-1])
        self._image_size = None if dense_size is None else image_size
        set_keras_defaults(self)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        if self._image_size is not None and x_BCHW.shape[2:] != self._image_size:
            height, width = self._image_size
            raise ValueError(f"its dense layer is for {height} x {width} (encoder.image_size)")
        return super().forward(x_BCHW)


def _convolution(num_in: int, num_out: int) -> nn.Sequential:
    convolution = nn.Conv2d(num_in, num_out, _KERNEL, _STRIDE, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(num_out), nn.ReLU(inplace=True))


def _dense(num_in: int, num_out: int) -> nn.Sequential:
    linear = nn.Linear(num_in, num_out, bias=False)
    # A map of one pixel, so that its batch norm is one of the kinds that every trunk has.
    as_map = nn.Unflatten(1, (num_out, 1, 1))
    return nn.Sequential(nn.Flatten(), linear, as_map, nn.BatchNorm2d(num_out), nn.ReLU(inplace=True))


def _num_pixels(image_size: tuple[int, int] | None, *, num_layers: int) -> int:
    """Return the number of pixels in the last map of pictures of a size."""
    if image_size is None:
        raise ValueError("the dense layer of a convnet depends on the size of its inputs; call with_form first")
    sides: tuple[int, ...] = image_size
    for _ in range(num_layers):
        sides = tuple((side - _KERNEL) // _STRIDE + 1 for side in sides)
    if min(sides) < 1:
        height, width = image_size
        raise UserError(
            f"the {num_layers} convolutions of a convnet leave no pixel of {height} x {width}; use larger pictures, "
            "or fewer encoder.channels"
        )
    return math.prod(sides)
