"""Build wide residual networks for small pictures, without the classifier (Zagoruyko and Komodakis 2016).

Shapes: B pictures, C channels, H by W pixels.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F

from trainer.models.trunk import ConvolutionalTrunk, draw_convolutions

STEM_WIDTH = 16
NUM_STAGES = 3


def wide_resnet_trunk(depth: int, widening: int, *, in_channels: int = 3) -> ConvolutionalTrunk:
    """Return WRN-`depth`-`widening`: a 3x3 stem, three stages of widths 16k, 32k, 64k, a last batch norm and a ReLU.

    Raises `ValueError` if depth is not 6 n + 4: n blocks of two convolutions in each stage, three shortcuts, the stem.
    """
    if depth < 10 or depth % 6 != 4:
        raise ValueError(f"depth is {depth}; it must be 10, 16, 22, ...")
    num_in = STEM_WIDTH
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv1=nn.Conv2d(in_channels, num_in, 3, padding=1, bias=False))
    for stage in range(NUM_STAGES):
        num_out, stride = STEM_WIDTH * widening * 2**stage, 1 if stage == 0 else 2
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
        activated_BCHW = F.relu(self.bn1(x_BCHW))
        residual_BCHW: Tensor = self.conv2(F.relu(self.bn2(self.conv1(activated_BCHW))))
        return residual_BCHW + (x_BCHW if self.shortcut is None else self.shortcut(activated_BCHW))
