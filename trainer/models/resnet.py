"""Build residual networks without the classifier: those of torchvision (He et al. 2016), and wide ones.

Shapes: B pictures, C channels, H by W pixels.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Literal, TypeAlias

from torch import Tensor, nn

from trainer.models.batch_norm import normalise_and_activate
from trainer.models.trunk import ConvolutionalTrunk, draw_convolutions

Init: TypeAlias = Literal["torch", "torchvision"]
"""The distribution of the initial weights of convolutions.

"torch" is the distribution of `torch.nn.Conv2d`: uniform, with a standard deviation of 1 / sqrt(3 fan_in).
"torchvision" is that of `torchvision.models.resnet`: normal, with a standard deviation of sqrt(2 / fan_out) (He et al.
2015). torchvision has no stem for one channel, so such a stem keeps torch's weights, as if a user had replaced `conv1`.
With batch norm, the distribution affects the size of the first steps: the larger the weights, the smaller the gradient.
"""

_WIDE_STEM = 16  # channels of the stem of a wide network


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, each with a batch norm, added to the input; layers are named as torchvision's.

    `downsample` makes the input what it is added to, if the shape changes.
    """

    expansion: Final = 1  # channels of the output, over those inside

    def __init__(self, num_in: int, num_inside: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_inside, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_inside)
        self.conv2 = nn.Conv2d(num_inside, num_inside, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_inside)
        self.downsample = downsample

    def forward(self, x_BCHW: Tensor) -> Tensor:
        inside_BCHW = self.conv2(normalise_and_activate(self.bn1, self.conv1(x_BCHW)))
        residual_BCHW = x_BCHW if self.downsample is None else self.downsample(x_BCHW)
        return normalise_and_activate(self.bn2, inside_BCHW, residual_BCHW)


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution, each with a batch norm, added to the input; named as torchvision's.

    `downsample` makes the input what it is added to, if the shape changes.
    """

    expansion: Final = 4

    def __init__(self, num_in: int, num_inside: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        num_out = num_inside * self.expansion
        self.conv1 = nn.Conv2d(num_in, num_inside, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_inside)
        self.conv2 = nn.Conv2d(num_inside, num_inside, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_inside)
        self.conv3 = nn.Conv2d(num_inside, num_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(num_out)
        self.downsample = downsample

    def forward(self, x_BCHW: Tensor) -> Tensor:
        inside_BCHW = self.conv2(normalise_and_activate(self.bn1, self.conv1(x_BCHW)))
        inside_BCHW = self.conv3(normalise_and_activate(self.bn2, inside_BCHW))
        residual_BCHW = x_BCHW if self.downsample is None else self.downsample(x_BCHW)
        return normalise_and_activate(self.bn3, inside_BCHW, residual_BCHW)


def blocks_of_depth(depth: int) -> tuple[type[BasicBlock] | type[Bottleneck], tuple[int, ...]]:
    """Return the block and the number of blocks in each stage, for a depth of 10, 18, 34 or 50."""
    num_blocks = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}[depth]
    return Bottleneck if depth == 50 else BasicBlock, num_blocks


def resnet_trunk(
    block: type[BasicBlock] | type[Bottleneck],
    num_blocks: tuple[int, ...],
    *,
    form: Literal["standard", "small"],
    width: int,
    in_channels: int = 3,
    stem_relu: bool = True,
    init: Init = "torch",
) -> ConvolutionalTrunk:
    """Return a stem and `len(num_blocks)` stages of widths w, 2w, 4w, ....

    Every stage but the first halves the map. The standard stem is a 7x7 convolution of stride 2 and a max-pooling, so
    that weights of torchvision's networks load by name. The small stem is a 3x3 convolution of stride 1, for small
    pictures (Chen et al. 2020, appendix B.9). `stem_relu=False` leaves out the ReLU after the stem, as in the published
    code of Huang et al. 2023. `init` is the distribution of the initial weights.
    """
    small = form == "small"
    kernel_size, stride, padding = (3, 1, 1) if small else (7, 2, 3)
    stem = nn.Conv2d(in_channels, width, kernel_size, stride, padding, bias=False)
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv1=stem, bn1=nn.BatchNorm2d(width))
    if stem_relu:
        layers["relu"] = nn.ReLU(inplace=True)
    if not small:
        layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    num_in = width
    for stage, num in enumerate(num_blocks):
        num_inside, stride = width * 2**stage, 1 if stage == 0 else 2
        num_out = num_inside * block.expansion
        shortcut: nn.Module | None = None
        if stride != 1 or num_in != num_out:
            shortcut = nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))
        blocks = [block(num_in, num_inside, stride, shortcut)]
        blocks += [block(num_out, num_inside) for _ in range(num - 1)]
        layers[f"layer{stage + 1}"] = nn.Sequential(*blocks)
        num_in = num_out
    trunk = ConvolutionalTrunk(layers, num_channels=num_in)
    if init == "torchvision":
        draw_convolutions(trunk, except_for=() if in_channels == 3 else (stem,))
    return trunk


def wide_resnet_trunk(depth: int, widening: int, *, in_channels: int = 3) -> ConvolutionalTrunk:
    """Return WRN-`depth`-`widening`, for small pictures (Zagoruyko and Komodakis 2016).

    It has a 3x3 stem, three stages of widths 16k, 32k, 64k, a last batch norm and a ReLU.
    The depth is 6 n + 4: n blocks of two convolutions in each stage, three shortcuts, the stem.
    """
    num_in = _WIDE_STEM
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv1=nn.Conv2d(in_channels, num_in, 3, padding=1, bias=False))
    for stage in range(3):
        num_out, stride = _WIDE_STEM * widening * 2**stage, 1 if stage == 0 else 2
        blocks = [PreActivationBlock(num_in, num_out, stride=stride)]
        blocks += [PreActivationBlock(num_out, num_out, stride=1) for _ in range((depth - 4) // 6 - 1)]
        layers[f"layer{stage + 1}"] = nn.Sequential(*blocks)
        num_in = num_out
    layers["bn1"] = nn.BatchNorm2d(num_in)
    layers["relu"] = nn.ReLU(inplace=True)
    trunk = ConvolutionalTrunk(layers, num_channels=num_in)
    draw_convolutions(trunk)
    return trunk


class PreActivationBlock(nn.Module):
    """A residual block: batch norm, ReLU and 3x3 convolution, twice, added to the input.

    If the shape changes, the result is added to a 1x1 convolution of the activated input.
    """

    def __init__(self, num_in: int, num_out: int, *, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(num_in)
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        same = num_in == num_out and stride == 1
        self.shortcut = None if same else nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        activated_BCHW = normalise_and_activate(self.bn1, x_BCHW)
        residual_BCHW: Tensor = self.conv2(normalise_and_activate(self.bn2, self.conv1(activated_BCHW)))
        return residual_BCHW + (x_BCHW if self.shortcut is None else self.shortcut(activated_BCHW))
