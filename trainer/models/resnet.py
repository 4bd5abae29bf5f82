"""Build residual networks from torchvision's blocks, without the classifier (He et al. 2016)."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Literal, TypeAlias

from torch import nn

from trainer.models.trunk import ConvolutionalTrunk, draw_convolutions

if TYPE_CHECKING:
    from torchvision.models.resnet import BasicBlock, Bottleneck

Init: TypeAlias = Literal["torch", "torchvision"]
"""The distribution of the initial weights of convolutions.

"torch" is the distribution of `torch.nn.Conv2d`: uniform, with a standard deviation of 1 / sqrt(3 fan_in).
"torchvision" is that of `torchvision.models.resnet`: normal, with a standard deviation of sqrt(2 / fan_out) (He et al.
2015). torchvision has no stem for one channel, so such a stem keeps torch's weights, as if a user had replaced `conv1`.
With batch norm, the distribution affects the size of the first steps: the larger the weights, the smaller the gradient.
"""


def blocks_of_depth(depth: int) -> tuple[type[BasicBlock] | type[Bottleneck], tuple[int, ...]]:
    """Return the block and the number of blocks in each stage, for a depth of 10, 18, 34 or 50."""
    # Not at the top: torchvision takes as long to import as torch, and objectives alone need no network.
    from torchvision.models.resnet import BasicBlock, Bottleneck

    num_blocks = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}[depth]
    return Bottleneck if depth == 50 else BasicBlock, num_blocks


def resnet_trunk(
    block: type[BasicBlock] | type[Bottleneck],
    num_blocks: tuple[int, ...],
    *,
    form: Literal["standard", "small"],
    width: int = 64,
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
