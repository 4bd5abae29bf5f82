"""Compute log-mel spectrograms of a batch of waveforms, as Tamkin et al. (2022) published them, on any device.

The published code squares the mel power once more before it takes decibels, so its decibels are twice the usual
decibels. Its mean and standard deviation for the normalisation fit near silence. Both are kept, because the published
budgets of the distortions are in these units.

Shapes: B batch, T points of a waveform, W points of a window, F frequencies of the transform, X = 2 F real and
imaginary parts, M mel bands from low to high, N frames in time, R frames of several waveforms.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from data_pipeline.core.counter_rng import can_use_numpy
from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import Schema

_FLOOR = 1e-5  # least mel power; its square is 1e-10, which is -100 doubled decibels
_CACHED_POINTS = 1 << 19  # points that a CPU transforms at once: 2 MiB in float32, which fits its cache
_NUM_FRAMES: Final = 64
_LEAST_POINTS: Final = (_NUM_FRAMES - 1) ** 2  # from here on, some distance of whole points gives 64 frames
_LEAST_RATE: Final = 2_000  # points a second; below, the lowest bands would be narrower than a frequency
_WINDOW_SECONDS: Final = 0.052  # of a window, between the published 43 and 64 ms; then a power of two of points
_BANDS_A_BANK = 8  # most weights of all bands together are zero; one product for each eight bands skips most of them


class MelConfig(Schema):
    """The settings of a spectrogram (num_mels, num_frames) of `num_points` points at `sample_rate` points a second.

    Windows are `n_fft` points long and `hop` points apart. Bands reach from 0 Hz to half the sample rate. The doubled
    decibels are raised to at least `range_db` below the loudest cell of a sound, and normalised with `mean` and `std`.
    """

    sample_rate: PositiveInt
    num_points: PositiveInt
    n_fft: PositiveInt
    hop: PositiveInt
    num_mels: PositiveInt = 64
    range_db: PositiveFloat = 80.0
    mean: float = -90.293
    std: PositiveFloat = 11.799

    @property
    def num_frames(self) -> int:
        return 1 + self.num_points // self.hop


AUDIOMNIST: Final = MelConfig(sample_rate=48_000, num_points=50_000, n_fft=2_048, hop=788)
# The same 1.04 s, number of frames and number of bands. Windows are 64 ms instead of 43 ms, in which the lowest bands
# would be hardly one frequency wide.
FSDD: Final = MelConfig(sample_rate=8_000, num_points=8_333, n_fft=512, hop=131)


def mel_config(sample_rate: int, num_points: int | None = None) -> MelConfig:
    """Return the spectrogram, 64 bands and 64 frames, of sounds with this rate in points a second.

    `num_points` is the length of a sound; None means the published 1.04 s. Windows are a power of two of points that
    lasts 37 to 74 ms, or longer if frames are further apart, so that every point is heard. The published spectrograms
    have settings of their own. Mean and std are the published ones for all sounds: a unit of the normalised spectrogram
    is always 11.8 doubled decibels, and so are the budgets of distortions.

    Raises `UserError` if there are too few points for so many frames, or for so many bands.
    """
    if num_points is None:
        num_points = AUDIOMNIST.num_points * sample_rate // AUDIOMNIST.sample_rate
    for config in (AUDIOMNIST, FSDD):
        if (config.sample_rate, config.num_points) == (sample_rate, num_points):
            return config
    hop = max(1, num_points // (_NUM_FRAMES - 1))
    num_fft = 2 ** round(math.log2(_WINDOW_SECONDS * sample_rate))
    config = MelConfig(
        sample_rate=sample_rate, num_points=num_points, n_fft=max(num_fft, 2 ** math.ceil(math.log2(hop))), hop=hop
    )
    if config.num_frames != _NUM_FRAMES or sample_rate < _LEAST_RATE:
        raise UserError(
            f"sounds of {num_points} points at {sample_rate} a second are too short for a spectrogram of "
            f"{_NUM_FRAMES} frames and bands; {_LEAST_POINTS} points are enough, at {_LEAST_RATE} a second or more"
        )
    return config


def power_mel(waveforms_BT: Tensor, config: MelConfig, *, needed_BN: Tensor | None = None) -> Tensor:
    """Return the power in each mel band and frame, (B, M, N) with the dtype (float32 or float64) and device as given.

    Frames are centred on every `hop`-th point, with zeros beyond both ends and a periodic Hann window. Bands have
    Slaney's scale and norm of equal area (librosa's defaults, McFee et al. 2015). N is 1 + T // `hop`.

    A frame that is False in `needed_BN` (bool; None needs all) has power 0. On a CPU such a frame costs nothing.
    """
    assert waveforms_BT.dtype in (torch.float32, torch.float64)
    window_W, banks = _filters(config, waveforms_BT.device, waveforms_BT.dtype)
    with torch.autocast(waveforms_BT.device.type, enabled=False):
        if not can_use_numpy(waveforms_BT):
            squares_BNX = _squares(_frames(waveforms_BT, config) * window_W)
            products = [squares_BNX[..., lowest:highest] @ weights_XM for lowest, highest, weights_XM in banks]
            power_BMN = torch.cat(products, dim=-1).transpose(1, 2)
            return power_BMN if needed_BN is None else power_BMN.masked_fill(~needed_BN[:, None, :], 0)
        # Only the needed frames, of a few sounds at a time, which fit the processor's cache: twice as fast. NumPy
        # gathers in a quarter of torch's time, and multiplies by the banks in half of it.
        num_sounds, num_frames = len(waveforms_BT), 1 + waveforms_BT.shape[1] // config.hop
        is_needed_BN = np.ones((num_sounds, num_frames), dtype=np.bool_) if needed_BN is None else needed_BN.numpy()
        power_BNM = waveforms_BT.new_zeros(num_sounds, num_frames, config.num_mels)
        size = max(1, _CACHED_POINTS // (num_frames * config.n_fft))
        for first in range(0, num_sounds, size):
            part = slice(first, first + size)
            frames_RW = _frames(waveforms_BT[part], config).numpy()[is_needed_BN[part]]
            if not len(frames_RW):
                continue
            squares_RX = _squares(torch.from_numpy(frames_RW).mul_(window_W)).numpy()
            of_banks = [squares_RX[:, lowest:highest] @ weights_XM.numpy() for lowest, highest, weights_XM in banks]
            power_BNM.numpy()[part][is_needed_BN[part]] = np.concatenate(of_banks, axis=1)
        return power_BNM.transpose(1, 2).contiguous()


def _frames(waveforms_BT: Tensor, config: MelConfig) -> Tensor:
    """Return the points under each window, (B, N, W), of which overlapping frames share memory."""
    half = config.n_fft // 2
    return F.pad(waveforms_BT, (half, half)).unfold(1, config.n_fft, config.hop)


def _squares(windowed_W: Tensor) -> Tensor:
    """Return the squared real and imaginary parts of the transform of each frame: (..., W) to (..., X).

    The two squares of a frequency lie side by side; the product with the weights of the bands adds them up.
    """
    return torch.view_as_real(torch.fft.rfft(windowed_W)).square_().flatten(-2)


def frames_that_hear(first_B: Tensor, length_B: Tensor, config: MelConfig) -> Tensor:
    """Return whether each frame covers any of the `length_B` points from `first_B` on, (B, N) bool."""
    centre_N = torch.arange(config.num_frames, device=first_B.device) * config.hop
    half = config.n_fft // 2
    is_reached_BN = centre_N + half > first_B[:, None]
    return is_reached_BN & (centre_N - half < (first_B + length_B)[:, None])


def audible_frames(waveforms_BT: Tensor, config: MelConfig) -> Tensor:
    """Return which frames of `power_mel` have any power, (B, N) bool.

    A frame has power if a point under its window is not 0. The window itself is 0 at its first point.
    """
    half = config.n_fft // 2
    points_BNW = F.pad(waveforms_BT.bool(), (half - 1, half)).unfold(1, config.n_fft - 1, config.hop)
    if not can_use_numpy(waveforms_BT):
        return points_BNW.any(dim=2)
    return torch.from_numpy(points_BNW.numpy().any(axis=2))  # stops at the first point that is not 0


def log_mel(power_BMN: Tensor, config: MelConfig) -> Tensor:
    """Return the normalised doubled decibels of a result of `power_mel`, with the same shape and dtype.

    x is 20 log10 of the power, raised to at least -100 and to at least `range_db` below the maximum of its sound. The
    result is (x - mean) / std; pure silence gives -0.823.
    """
    decibels_BMN = power_BMN.clamp(min=_FLOOR).log().mul_(20 / math.log(10))
    least_B11 = decibels_BMN.amax(dim=(1, 2), keepdim=True) - config.range_db
    return decibels_BMN.maximum(least_B11).sub_(config.mean).div_(config.std)


@cache  # a recorded step reads them, so none may be freed
def _filters(
    config: MelConfig, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, list[tuple[int, int, Tensor]]]:
    """Return the window, and the banks of bands: the first and the end of their parts of the spectrum, and weights."""
    with torch.inference_mode(False):  # the cache must not keep inference tensors: training could not use them
        window = torch.hann_window(config.n_fft, dtype=torch.float64)
        weights_FM = mel_weights(config).to(device, dtype)
        banks = []
        for part_FM in torch.split(weights_FM, _BANDS_A_BANK, dim=1):
            used = part_FM.any(dim=1).nonzero()
            lowest, highest = int(used.min()), int(used.max()) + 1
            weights_MX = part_FM[lowest:highest].T.repeat_interleave(2, dim=1)  # this layout is a third faster on a CPU
            banks.append((2 * lowest, 2 * highest, weights_MX.T))
        return window.to(device, dtype), banks


def mel_weights(config: MelConfig) -> Tensor:
    """Return the weight of each frequency in each band, (F, M) float32, with Slaney's mel (1998): triangles of area 1.

    Their corners are equally far apart in mel: 15 mel reach to 1,000 Hz, and from there 27 mel to 6.4 times as much.
    """
    highest, a_mel = config.sample_rate / 2, math.log(6.4) / 27
    highest_mel = highest * 3 / 200 if highest < 1_000 else 15 + math.log(highest / 1_000) / a_mel
    mel = torch.linspace(0, highest_mel, config.num_mels + 2)
    corners = torch.where(mel < 15, 200 / 3 * mel, 1_000 * torch.exp(a_mel * (mel - 15)))
    left, peak, right = corners[:-2], corners[1:-1], corners[2:]
    frequency_F1 = torch.linspace(0, config.sample_rate // 2, config.n_fft // 2 + 1)[:, None]
    triangles_FM = torch.minimum((frequency_F1 - left) / (peak - left), (right - frequency_F1) / (right - peak))
    return triangles_FM.clamp(min=0) * (2 / (right - left))
