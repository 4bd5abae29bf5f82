"""The viewmaker: a network that learns to make views, with a budget for the change of a picture.

Input: pictures in [0, 1] and the keys of their noise. Output: the pictures plus a perturbation, whose mean size per
entry is the budget. The network is from Tamkin et al. (2021, "Viewmaker Networks"), in the form of "Feature Dropout"
(2022): a stem, residual blocks on a map a quarter as wide, and two upsamplings. A channel of uniform noise is appended
before the stem and before each residual block.

Invariants: no noise comes from global random state, and no perturbation exceeds the budget.

Options: the network can see a smaller picture (`downsample_to`). It can be kept away from the object drawn on the
picture (`mask`), and it can change only some of the views (`dropout_rate`).

Some convolutions are computed in another order than in the paper, with equal results: see `upsample_convolve` and
`convolve_large_kernel`. Each layer returns its map with the mirrored border that the next convolution reads. On a GPU,
all maps are channels_last, and kernels in Triton make norms with what follows them (`viewmaker_kernels`). On a CPU, in
float64, and if Triton does not work here, torch's layers run.

Legend: B samples, C channels, H rows, W columns, I and O input and output channels, K kernel size.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from itertools import zip_longest
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from data_pipeline.audio.log_mel import MelConfig
from data_pipeline.core.counter_rng import DrawKeys, uniform, uniforms
from data_pipeline.core.sample import MASK_BOX, MASK_OBJECT, MASK_OUTSIDE
from data_pipeline.core.schema import ImageSize, PositiveShare
from trainer import triton_works
from trainer.models.activation_checkpointing import Checkpointing, run_blocks
from trainer.triton_works import check_near, kernels
from trainer.views.expert_audio import Waveform, WaveformConfig, clean_spectrogram
from trainer.views.inputs import check_pictures
from trainer.views.policy import BaseViewsConfig, ViewsInputs

_ATTACK_PURPOSE = 0  # `purpose` in `data_pipeline.core.counter_rng`
_FIRST_NOISE_PURPOSE = 1
_STRIDE = 4  # of the stem
_LARGE_KERNEL = 9  # rows and columns of the kernel of the first and the last convolution
_FEW_CHANNELS = 8
_MIN_SIZE = 8  # the stem pads by 4 reflected pixels, a residual block by 1
_KERNELS = "trainer.views.viewmaker_kernels"
_FIRST_MASKED_LEVEL = {"box": MASK_BOX, "object": MASK_OBJECT}

Pairing = Literal["independent", "exclusive"]


class ViewmakerConfig(BaseViewsConfig):
    """The config of the viewmaker.

    budget: the mean absolute change per entry of a picture in [0, 1].
    clamp: whether views are clamped to [0, 1], as in the paper; the published configs of the original code do not
        clamp. Inputs that are not pictures (spectrograms) must not be clamped.
    base_width: the width of the network; 32 is the published network (channels 32, 64, 128).
    downsample_to: the rows and columns of a smaller picture for the network. Its perturbation is stretched over the
        picture (both bilinear), which spends at most the budget.
    mask: what is protected: the "box" around the drawn object, or the pixels of the "object" (the masked viewmaker of
        Tamkin et al. 2022). The finished perturbation is masked: the change outside stays the same, and the budget on
        the masked part is lost.
    dropout_rate: the share of the views that the viewmaker may change, drawn for each view (`attacked_views`). The
        other views equal their pictures. It is an upper bound on how often any feature is dropped. None: the viewmaker
        changes every view, and only the budget limits how often a feature is dropped.
    dropout_pairing: "independent" draws for each view of a pair, so a share `dropout_rate ** 2` of the pairs is changed
        in both views. "exclusive" (for rates up to 1/2) changes at most one view of a pair, so a share
        `2 * dropout_rate` of the pairs is changed.
    waveform: for sounds only, the change of the waveform before the viewmaker sees its spectrogram. None follows the
        paper. The published code used the default settings in training, which the paper does not mention.
    """

    is_learned: ClassVar[bool] = True
    takes_sounds: ClassVar[bool] = True

    kind: Literal["viewmaker"] = "viewmaker"
    num_res_blocks: Annotated[int, Field(ge=1, le=100)] = 3
    budget: Annotated[float, Field(ge=1e-6, le=1e3)] = 0.05
    clamp: bool = True
    base_width: Annotated[int, Field(ge=1, le=1_024)] = 32
    downsample_to: ImageSize | None = None
    mask: Literal["none", "box", "object"] = "none"
    dropout_rate: PositiveShare | None = None
    dropout_pairing: Pairing = "independent"
    waveform: WaveformConfig | None = None

    @model_validator(mode="after")
    def _options_fit_each_other(self) -> Self:
        if self.downsample_to is not None and not _is_possible(self.downsample_to):
            raise ValueError(
                f"downsample_to is {self.downsample_to}; it must be a multiple of {_STRIDE}, at least {_MIN_SIZE}"
            )
        if self.dropout_pairing == "exclusive" and (self.dropout_rate is None or self.dropout_rate > 0.5):
            raise ValueError(
                "dropout_pairing=exclusive changes at most one view of a pair, so at most half of all views; it needs "
                f"a dropout_rate up to 0.5, got {self.dropout_rate}"
            )
        return self

    def build(self, given: ViewsInputs) -> Viewmaker:
        if given.mel is None:
            return Viewmaker(self, image_channels=given.image_channels)
        return SoundViewmaker(self, given.mel)

    def check_medium(self, mel: MelConfig | None) -> None:
        if mel is None and self.waveform is not None:
            raise ValueError("views.waveform changes sounds, but these are pictures; set views.waveform=null")
        if mel is not None and self.clamp:
            raise ValueError("views.clamp keeps views in [0, 1], but spectrograms lie outside; set views.clamp=false")
        if mel is not None and self.mask != "none":
            raise ValueError(
                f"views.mask={self.mask} protects objects in pictures, but sounds have none; set views.mask=none"
            )

    def check_image_size(self, *, height: int, width: int) -> None:
        size = f"{height} x {width}"
        if not (_is_possible(height) and _is_possible(width)):
            raise ValueError(
                f"the viewmaker needs a height and width that are multiples of {_STRIDE}, at least {_MIN_SIZE}, got "
                f"{size}"
            )
        if self.downsample_to is not None and (height % self.downsample_to or width % self.downsample_to):
            raise ValueError(
                f"downsample_to={self.downsample_to} needs a height and width that are multiples of it, got {size}"
            )

    @property
    def protects(self) -> str | None:
        return None if self.mask == "none" else f"views.mask={self.mask}"


def _is_possible(size: int) -> bool:
    return size >= _MIN_SIZE and size % _STRIDE == 0


def project(r_BCHW: Tensor, *, budget: float) -> Tensor:
    """Squash `r` and scale it to the budget: mean |delta| = budget (Tamkin et al. 2021).

    delta = budget * tanh(r) / (mean |tanh(r)| + 1e-4), with one mean for each sample. The budget is never exceeded, and
    a share of 1e-4 / (mean + 1e-4) is not spent. Computed in float32 at least.
    """
    u_BCHW = torch.tanh(r_BCHW.to(torch.promote_types(r_BCHW.dtype, torch.float32)))
    if module := _kernels(u_BCHW):
        delta_BCHW: Tensor = module.spend(u_BCHW.contiguous(memory_format=torch.channels_last), None, budget)
        return delta_BCHW
    return budget * u_BCHW / (u_BCHW.abs().mean(dim=(1, 2, 3), keepdim=True) + 1e-4)


def attacked_views(keys: DrawKeys, *, rate: float, pairing: Pairing = "independent") -> Tensor:
    """Draw which views a viewmaker may change, (B,) bool on the device of the keys, each with probability `rate`.

    Depends on the keys alone. The views 2 n and 2 n + 1 of a sample are a pair. They are drawn independently, or from
    one number: a low number chooses the first view and a high number the second, so never both (`rate` is at most 1/2).
    """
    if pairing == "independent":
        return uniform(keys, 1, purpose=_ATTACK_PURPOSE)[:, 0] < rate
    assert keys.is_next_B is None or keys.view % 2 == 0  # both views of a pair
    first_of_pair = dataclasses.replace(keys, view=keys.view & ~1, is_next_B=None)
    shared_B = uniform(first_of_pair, 1, purpose=_ATTACK_PURPOSE)[:, 0]
    first_B, second_B = shared_B < rate, shared_B >= 1 - rate
    if keys.is_next_B is not None:
        return torch.where(keys.is_next_B, second_B, first_B)
    return second_B if keys.view & 1 else first_B


def _try_out(_: ModuleType, dtype: torch.dtype) -> None:
    """Compare noise, and a layer with a residual and its gradients, with those of a CPU in float64."""
    keys = DrawKeys(seed=0, epoch=0, index_B=torch.arange(2), view=0)
    draws, results = torch.Generator().manual_seed(0), []
    maps = (torch.randn(2, channels, 10, 10, generator=draws).to(dtype) for channels in (16, 17))
    x_BCHW, grad_BCHW = (each.contiguous(memory_format=torch.channels_last) for each in maps)
    with torch.random.fork_rng(devices=[]):
        layer = ConvNorm(16, 16).to(dtype)
    for device, own_dtype in (("cpu", torch.float64), (triton_works.DEVICE, dtype)):
        noise_LBHW = draw_noise(dataclasses.replace(keys, index_B=keys.index_B.to(device)), 8, 8, layers=range(2))
        own = copy.deepcopy(layer).to(device, own_dtype)
        x, grad, noise = (each.to(device, own_dtype) for each in (x_BCHW, grad_BCHW, noise_LBHW[0]))
        out = own(x.requires_grad_(), *prepare([own], x)[0], x, noise)[:, :17]
        out.backward(grad)
        r = x.detach().to(torch.promote_types(own_dtype, torch.float32)).requires_grad_()
        delta = project(r, budget=0.05)
        torch.autograd.backward(delta, delta.detach().roll(1, 0))
        gradients = (x.grad, own.conv.weight.grad, own.norm.weight.grad, own.norm.bias.grad, r.grad)
        results.append((noise_LBHW, out, delta, *gradients))
    check_near(*reversed(results))


def _convolved_dtype(x: Tensor) -> torch.dtype:
    is_cast = x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if is_cast else x.dtype


def _kernels(x: Tensor) -> ModuleType | None:
    """Return the module of kernels for what follows convolutions of `x`; None if they do not take it."""
    if x.device.type != triton_works.DEVICE:
        return None
    return kernels(_KERNELS, x.device, _convolved_dtype(x), _try_out)


def with_border(x_BCHW: Tensor, border: int, *, repeat_edge: bool = False) -> Tensor:
    """Mirror the pixels at each edge, without the edge or, for a border of one pixel, the edge itself."""
    if repeat_edge and torch.compiler.is_compiling():  # torch 2.11 compiles its backward pass with wrong strides
        x_BCHW = torch.cat([x_BCHW[:, :, :1], x_BCHW, x_BCHW[:, :, -1:]], dim=2)
        return torch.cat([x_BCHW[..., :1], x_BCHW, x_BCHW[..., -1:]], dim=3)
    return F.pad(x_BCHW, (border,) * 4, mode="replicate" if repeat_edge else "reflect")


def upsample_convolve(x_BIHW: Tensor, weight_OIKK: Tensor) -> Tensor:
    """Repeat every pixel 2 x 2, pad by one reflected pixel, convolve 3 x 3: (B, I, H + 2, W + 2) to (B, O, 2H, 2W).

    Computed as one transposed convolution of the small map with stride 2. Its 4 x 4 kernel sums the taps on the same
    small pixel, so four output pixels need 16 products instead of 36. A reflected pixel of the large map repeats the
    edge of the small map: its border of one pixel, which the input has. The weight may be that kernel already, flipped.
    """
    if weight_OIKK.shape[-1] == 3:
        taps_OIKK = F.avg_pool2d(weight_OIKK, 2, stride=1, padding=1, divisor_override=1)  # a sum: divided by 1
        weight_OIKK = taps_OIKK.flip(2, 3)
    if x_BIHW.device.type == "cpu" and weight_OIKK.shape[0] <= _FEW_CHANNELS:
        x_BIHW = x_BIHW.contiguous(memory_format=torch.channels_last)
    return F.conv_transpose2d(x_BIHW, weight_OIKK.transpose(0, 1), stride=2, padding=3)


def convolve_large_kernel(x_BIHW: Tensor, weight_OIKK: Tensor) -> Tensor:
    """Convolve K x K. The input has a border of K // 2 pixels, and the output, without it, an even size.

    Fast for few channels: on a CPU, and if O is at most 8, the four output pixels of a 2 x 2 square become channels of
    a convolution with stride 2. Its K + 1 x K + 1 kernels are the same kernel at the four places. A processor's vector
    lanes hold 8 or 16 channels; 3 output channels would leave most of them empty.
    """
    if x_BIHW.device.type != "cpu":
        return F.conv2d(x_BIHW, weight_OIKK)
    x_BIHW = x_BIHW.contiguous(memory_format=torch.channels_last)
    if weight_OIKK.shape[0] > _FEW_CHANNELS:
        return F.conv2d(x_BIHW, weight_OIKK)
    places = [F.pad(weight_OIKK, (right, 1 - right, down, 1 - down)) for down in (0, 1) for right in (0, 1)]
    kernels_XIKK = torch.stack(places, dim=1).flatten(0, 1)  # X = 4 O; kernels of K + 1 x K + 1
    return F.pixel_shuffle(F.conv2d(x_BIHW, kernels_XIKK, stride=2), 2)


def _convolve(x_BIHW: Tensor, weight_OIKK: Tensor, resize: Literal["down", "up"] | None = None) -> Tensor:
    """Convolve a map with a border."""
    if resize == "up":
        return upsample_convolve(x_BIHW, weight_OIKK)
    if weight_OIKK.shape[-1] == _LARGE_KERNEL:
        return convolve_large_kernel(x_BIHW, weight_OIKK)
    return F.conv2d(x_BIHW, weight_OIKK, stride=2 if resize == "down" else 1)


class ConvNorm(nn.Module):
    """A convolution and an instance norm with scale and shift, without running statistics.

    It reads and returns maps with a border: `border` pixels for the next convolution, which mirror the map without its
    edge, or with it (`repeat_edge`).

    The norm cancels the bias of the convolution. The published network has this bias, so it is here too, but it is not
    added, and `Viewmaker` sets its gradient to exactly 0. Adam would turn a rounding error in place of 0 into full
    steps, which would differ with the number of ranks.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel_size: int = 3,
        resize: Literal["down", "up"] | None = None,
        border: int = 1,
        repeat_edge: bool = False,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.norm = nn.InstanceNorm2d(out_channels, affine=True)
        self.resize, self.border, self.repeat_edge = resize, border, repeat_edge

    def forward(
        self,
        x_BCHW: Tensor,
        weight_OIKK: Tensor,
        affine_B2C: Tensor | None,
        residual_BCHW: Tensor | None = None,
        noise_BHW: Tensor | None = None,
    ) -> Tensor:
        """Return the ReLU of the normalised map, or its sum with a residual, and append the noise, if there is any.

        The residual has a border of one pixel. Weight and parameters of the norm are from `prepare`.
        """
        norm = self.norm
        y_BCHW = _convolve(x_BCHW, weight_OIKK, self.resize)
        if affine_B2C is not None:
            from trainer.views import viewmaker_kernels  # not at the top: Triton is large, and not on every system

            y_BCHW = y_BCHW.contiguous(memory_format=torch.channels_last)  # as it is, unless torch has no such form
            out_BCHW: Tensor = viewmaker_kernels.normalise(
                y_BCHW, affine_B2C, residual_BCHW, noise_BHW, norm.eps, self.border, self.repeat_edge
            )[0]
            return out_BCHW
        # With one channel in each group, group norm is instance norm; it is twice as fast if the map is contiguous.
        y_BCHW = F.group_norm(y_BCHW.contiguous(), y_BCHW.shape[1], norm.weight, norm.bias, norm.eps)
        y_BCHW = F.relu(y_BCHW) if residual_BCHW is None else residual_BCHW[..., 1:-1, 1:-1] + y_BCHW
        y_BCHW = y_BCHW if noise_BHW is None else append_channel(y_BCHW, noise_BHW)
        return with_border(y_BCHW, self.border, repeat_edge=self.repeat_edge)


def prepare(layers: Sequence[ConvNorm], x_BCHW: Tensor, *further: nn.Conv2d) -> list[tuple[Tensor, Tensor | None]]:
    """Return the weights of layers and of further convolutions; for kernels, filled, with the norms' parameters."""
    convolutions = [layer.conv for layer in layers] + list(further)
    if (module := _kernels(x_BCHW)) is None:
        return [(convolution.weight, None) for convolution in convolutions]
    upsamples = [layer.resize == "up" for layer in layers] + [False] * len(further)
    norms = [parameter for layer in layers for parameter in (layer.norm.weight, layer.norm.bias)]
    given = [convolution.weight for convolution in convolutions], upsamples, norms, len(x_BCHW)
    weights, affine_LB2C = module.prepared(*given, _convolved_dtype(x_BCHW))
    return list(zip_longest(weights, affine_LB2C))


class Residual(nn.Module):
    """A residual block, x + norm(conv(relu(norm(conv(x))))), with no activation after the sum."""

    def __init__(self, num_channels: int, *, repeat_edge: bool = False) -> None:
        super().__init__()
        self.first = ConvNorm(num_channels, num_channels)
        self.second = ConvNorm(num_channels, num_channels, repeat_edge=repeat_edge)

    def forward(self, x_BCHW: Tensor, first: Any, second: Any, noise_BHW: Tensor | None) -> Tensor:
        """Return the sum, with the channel of noise of the next block, if there is one."""
        out_BCHW: Tensor = self.second(self.first(x_BCHW, *first), *second, x_BCHW, noise_BHW)
        return out_BCHW


class Viewmaker(nn.Module):
    """The network `viewmaker(images_BCHW, keys, masks_BHW) -> views_BCHW`; equal keys give equal views in any mode.

    If `keeps_change`, `change` holds the pictures or spectrograms of the last call and their views, until a training
    step takes them.
    """

    keeps_change = False
    change: tuple[Tensor, Tensor] | None = None

    def __init__(self, config: ViewmakerConfig, *, image_channels: int) -> None:
        super().__init__()
        self.config = config
        self.checkpointing: Checkpointing = "none"
        width = config.base_width
        self.stem = nn.ModuleList(
            [
                ConvNorm(image_channels + 1, width, kernel_size=_LARGE_KERNEL),
                ConvNorm(width, 2 * width, resize="down"),
                ConvNorm(2 * width, 4 * width, resize="down"),
            ]
        )
        num_blocks = config.num_res_blocks
        self.blocks = nn.ModuleList(
            [Residual(4 * width + 1 + block, repeat_edge=block == num_blocks - 1) for block in range(num_blocks)]
        )
        self.upsample = nn.ModuleList(
            [
                ConvNorm(4 * width + num_blocks, 2 * width, resize="up", repeat_edge=True),
                ConvNorm(2 * width, width, resize="up", border=_LARGE_KERNEL // 2),
            ]
        )
        self.out = nn.Conv2d(width, image_channels, _LARGE_KERNEL)
        self._layers: Callable[[Tensor, Tensor, Any, bool], Tensor] = self._run_layers

    def compile_layers(self, **options: Any) -> None:
        """Compile the network by `torch.compile` with these options. Noise is drawn outside: its keys change."""
        self._layers = torch.compile(self._run_layers, **options)

    def forward(self, images_BCHW: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        """Return views of pictures in [0, 1], with the same shape and dtype; with `clamp` they are in [0, 1] too.

        Other inputs of one or more channels (spectrograms) work too, without the clamp.
        """
        views_BCHW = images_BCHW + self.deltas(images_BCHW, keys, masks_BHW)
        views_BCHW = views_BCHW.clamp(0, 1) if self.config.clamp else views_BCHW
        if self.keeps_change:
            self.change = images_BCHW.detach(), views_BCHW.detach()
        return views_BCHW

    def deltas(self, images_BCHW: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        """Return the perturbations before any clamp.

        The mean absolute value for each sample is the budget. It is less if the config has a mask or a `downsample_to`.
        With a `dropout_rate`, the perturbation is exactly 0 for views that are not changed, which add nothing to any
        gradient. The network runs on these views too, because the host would have to wait for their number to leave
        them out.
        """
        check_pictures(images_BCHW, keys)
        config = self.config
        H, W = images_BCHW.shape[2:]
        config.check_image_size(height=H, width=W)
        outside_B1HW = None if config.mask == "none" else _outside(masks_BHW, config.mask, like_BCHW=images_BCHW)

        x_BCHW = images_BCHW
        if config.downsample_to is not None:
            x_BCHW = F.interpolate(x_BCHW, size=(config.downsample_to,) * 2, mode="bilinear")

        delta_BCHW = project(self._network(x_BCHW, keys), budget=config.budget)
        if config.downsample_to is not None:
            delta_BCHW = F.interpolate(delta_BCHW, size=(H, W), mode="bilinear")
        if outside_B1HW is not None:
            delta_BCHW = delta_BCHW * outside_B1HW
        if config.dropout_rate is not None:
            # Not left out: the host would wait for their number, and a rank without one would reduce no gradients.
            attacked_B = attacked_views(keys, rate=config.dropout_rate, pairing=config.dropout_pairing)
            delta_BCHW = delta_BCHW * attacked_B[:, None, None, None].to(delta_BCHW.dtype)
        return delta_BCHW

    def _network(self, x_BCHW: Tensor, keys: DrawKeys) -> Tensor:
        H, W = x_BCHW.shape[2:]
        (noise_BHW,) = draw_noise(keys, H, W, layers=range(1))
        noise_of_blocks_LBHW = draw_noise(keys, H // _STRIDE, W // _STRIDE, layers=range(1, 1 + len(self.blocks)))
        learns = self.out.weight.requires_grad  # an argument, because the compiler does not see this flag change
        x_BCHW = _entering(append_channel(x_BCHW, noise_BHW))
        layers = [module for module in self.modules() if isinstance(module, ConvNorm)]
        return self._layers(x_BCHW, noise_of_blocks_LBHW, prepare(layers, x_BCHW, self.out), learns)

    def _run_layers(self, x_BCHW: Tensor, noise_of_blocks_LBHW: Tensor, prepared: Any, learns: bool) -> Tensor:
        """Return the perturbations before the budget, from pictures with their channel of noise and a border."""

        def called(layer: nn.Module, noise_BHW: Tensor | None) -> Callable[[Tensor], Tensor]:
            own = [next(of_layers), next(of_layers)] if isinstance(layer, Residual) else next(of_layers)
            return lambda x_BCHW: layer(x_BCHW, *own, noise_BHW=noise_BHW)

        of_layers = iter(prepared)
        layers = [*self.stem, *self.blocks, *self.upsample]
        noises = [None, None, *noise_of_blocks_LBHW, None, None, None]  # each appended by the layer before its block
        blocks = [called(layer, noise_BHW) for layer, noise_BHW in zip(layers, noises, strict=True)]
        checkpointing = self.checkpointing if self.training else "none"
        assert self.out.bias is not None
        x_BCHW = run_blocks(blocks, x_BCHW, checkpointing=checkpointing)
        r_BHWC = _convolve(x_BCHW, next(of_layers)[0]).permute(0, 2, 3, 1)
        # Without channels that are only filled; the gradient of this slice is channels_last, too.
        r_BCHW = r_BHWC[..., : len(self.out.bias)].permute(0, 3, 1, 2) + self.out.bias[:, None, None]
        if not learns:
            return r_BCHW
        unused = [module.conv.bias for module in self.modules() if isinstance(module, ConvNorm)]
        with_zeros_BCHW: Tensor = _WithZeroGradients.apply(r_BCHW, *unused)  # type: ignore[no-untyped-call]
        return with_zeros_BCHW


class SoundViewmaker(Viewmaker):
    """The policy `viewmaker(waveforms_BT, keys) -> views_B1MN`; its parameters have the same names as a `Viewmaker`.

    It changes the spectrograms of sounds like pictures. The mean size of the perturbation per entry is the budget, in
    units of the normalised spectrogram (Tamkin et al. 2022: 0.125, without a clamp).

    Shapes: T points of a waveform, M mel bands, N frames.
    """

    def __init__(self, config: ViewmakerConfig, mel: MelConfig) -> None:
        super().__init__(config, image_channels=1)
        self.mel = mel
        self.waveform = None if config.waveform is None else Waveform(config.waveform, mel)

    def forward(self, waveforms_BT: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        """Return views (B, 1, M, N) of waveforms (B, T), in their dtype."""
        changed_BT = waveforms_BT if self.waveform is None else self.waveform.augment(waveforms_BT, keys)
        return super().forward(clean_spectrogram(changed_BT, self.mel), keys)


def _outside(masks_BHW: Tensor | None, mask: Literal["box", "object"], *, like_BCHW: Tensor) -> Tensor:
    """Return 1 for each pixel of the pictures that may change and 0 for the others, (B, 1, H, W)."""
    if masks_BHW is None:
        raise ValueError(f"the viewmaker has mask={mask}, but these pictures have no masks of their objects")
    B, _, H, W = like_BCHW.shape
    if masks_BHW.dtype != torch.uint8 or masks_BHW.shape != (B, H, W):
        raise ValueError(
            f"masks must be uint8 of shape {(B, H, W)} in the levels of data_pipeline.core.sample, {MASK_OUTSIDE} "
            f"outside, {MASK_BOX} in the box and {MASK_OBJECT} on the object, got {masks_BHW.dtype} of shape "
            f"{tuple(masks_BHW.shape)}"
        )
    return (masks_BHW < _FIRST_MASKED_LEVEL[mask]).unsqueeze(1).to(like_BCHW.dtype)


def draw_noise(keys: DrawKeys, height: int, width: int, *, layers: range) -> Tensor:
    """Return uniform noise in [0, 1), (L, B, H, W) float32, drawn from the keys and the number of each layer alone."""
    purposes = [_FIRST_NOISE_PURPOSE + layer for layer in layers]
    if module := kernels(_KERNELS, keys.index_B.device, torch.float32, _try_out):
        noise_LBHW: Tensor = module.noise(keys, height, width, purposes)
        return noise_LBHW
    return uniforms(keys, height * width, purposes=purposes).view(len(layers), -1, height, width)


def _entering(x_BCHW: Tensor) -> Tensor:
    """Return pictures with the border of the first convolution; if there are kernels, with filled channels."""
    x_BCHW = with_border(x_BCHW, _LARGE_KERNEL // 2)
    if _kernels(x_BCHW) is None:
        return x_BCHW
    filled_BCHW = F.pad(x_BCHW, (0, 0, 0, 0, 0, -x_BCHW.shape[1] % 8))
    return filled_BCHW.to(_convolved_dtype(x_BCHW), memory_format=torch.channels_last)


def append_channel(x_BCHW: Tensor, channel_BHW: Tensor) -> Tensor:
    return torch.cat([x_BCHW, channel_BHW[:, None].to(x_BCHW.dtype)], dim=1)


class _WithZeroGradients(torch.autograd.Function):
    """A tensor as it is; the backward pass gives parameters, which `x` does not depend on, gradients of exactly 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.shapes, ctx.dtype = [parameter.shape for parameter in parameters], parameters[0].dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sizes = [shape.numel() for shape in ctx.shapes]
        zeros = torch.split(gradient.new_zeros(sum(sizes), dtype=ctx.dtype), sizes)
        return gradient, *(
            zero.view(shape) if needs_gradient else None
            for zero, shape, needs_gradient in zip(zeros, ctx.shapes, ctx.needs_input_grad[1:], strict=True)
        )
