"""Compute log-mel spectrograms of a batch of waveforms, as Tamkin et al. (2022) published them, on any device.

The published code squares the mel power once more before it takes decibels, so its decibels are twice the usual
decibels. Its mean and standard deviation for the normalisation fit near silence. Both are kept, because the published
budgets of the distortions are in these units.

Shapes: B batch, T points of a waveform, W points of a window, F frequencies of the transform, X = 2 F real and
imaginary parts, M mel bands from low to high, N frames in time, R frames of several waveforms, S some of the waveforms.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
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

_Array = NDArray[np.floating[Any]]


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
    filters = _filters(config, waveforms_BT.device, waveforms_BT.dtype)
    with torch.autocast(waveforms_BT.device.type, enabled=False):
        if can_use_numpy(waveforms_BT):
            return _power_mel_of_needed(waveforms_BT, needed_BN, config, filters)
        power_BMN = _power_mel(waveforms_BT, config, filters)
        return power_BMN if needed_BN is None else power_BMN.masked_fill(~needed_BN[:, None, :], 0)


def _power_mel(waveforms_BT: Tensor, config: MelConfig, filters: _Filters) -> Tensor:
    frames_BNW = _frames(waveforms_BT, 0, 1 + waveforms_BT.shape[1] // config.hop, config)
    squares_BNX = _squares(frames_BNW * filters.window_W)
    products = [squares_BNX[..., bank.lowest : bank.highest] @ bank.weights_XM for bank in filters.banks]
    return torch.cat(products, dim=2).transpose(1, 2)


def _power_mel_of_needed(
    waveforms_BT: Tensor, needed_BN: Tensor | None, config: MelConfig, filters: _Filters
) -> Tensor:
    """Do `_power_mel` on the needed frames in parts that fit the processor's cache, which is twice as fast."""
    num_points = waveforms_BT.shape[1]
    num_frames = 1 + num_points // config.hop
    power_BNM = waveforms_BT.new_zeros(len(waveforms_BT), num_frames, config.num_mels)
    # Frames that reach beyond an end need zeros there, and so a copy. They are handled apart, to copy only few points.
    half = config.n_fft // 2
    first_whole = min(num_frames, math.ceil(half / config.hop))
    end_of_whole = max(first_whole, (num_points - config.n_fft + half) // config.hop + 1)
    for first, end in itertools.pairwise((0, first_whole, end_of_whole, num_frames)):
        if first == end:
            continue
        frames_BNW, out_BNM = _frames(waveforms_BT, first, end, config), power_BNM[:, first:end].numpy()
        if needed_BN is None:
            size = max(1, _CACHED_POINTS // frames_BNW[0].numel())
            for start in range(0, len(frames_BNW), size):
                windowed_BNW = frames_BNW[start : start + size] * filters.window_W
                power_RM = _power(windowed_BNW.flatten(0, 1), filters)
                out_BNM[start : start + size] = power_RM.reshape(*windowed_BNW.shape[:2], config.num_mels)
        else:
            samples_R, frames_R = needed_BN[:, first:end].numpy().nonzero()
            size = max(1, _CACHED_POINTS // 2 // config.n_fft)  # half, because the gathered frames need memory too
            for start in range(0, len(samples_R), size):
                index_R = samples_R[start : start + size], frames_R[start : start + size]
                # NumPy gathers in a quarter of torch's time; torch multiplies in half of NumPy's time.
                windowed_RW = torch.from_numpy(frames_BNW.numpy()[index_R]).mul_(filters.window_W)
                out_BNM[index_R] = _power(windowed_RW, filters)
    return power_BNM.transpose(1, 2).contiguous()


def _frames(waveforms_BT: Tensor, first: int, end: int, config: MelConfig) -> Tensor:
    """Return frames `first` to `end` - 1, (B, N, W), as a view: overlapping frames share memory."""
    start = first * config.hop - config.n_fft // 2
    stop = start + (end - 1 - first) * config.hop + config.n_fft
    missing = max(0, -start), max(0, stop - waveforms_BT.shape[1])
    points_BT = waveforms_BT[:, max(0, start) : stop]
    return (F.pad(points_BT, missing) if any(missing) else points_BT).unfold(1, config.n_fft, config.hop)


def _squares(frames_W: Tensor) -> Tensor:
    """Return the squared real and imaginary parts of the transform of each frame: (..., W) to (..., X).

    The two squares of a frequency lie side by side; the product with the weights of the bands adds them up.
    """
    return torch.view_as_real(torch.fft.rfft(frames_W)).square_().flatten(-2)


def _power(windowed_RW: Tensor, filters: _Filters) -> _Array:
    """Return the power in each band, (R, M)."""
    squares_RX = _squares(windowed_RW).numpy()
    power_RM = np.empty((len(squares_RX), filters.num_mels), squares_RX.dtype)
    for lowest, highest, bands, weights_XM in filters.banks_of_numpy:
        np.matmul(squares_RX[:, lowest:highest], weights_XM, out=power_RM[:, bands])
    return power_RM


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
    if not can_use_numpy(waveforms_BT):
        return _points_of_frames(waveforms_BT, config).any(dim=2)
    num_points = waveforms_BT.shape[1]
    centre_N = torch.arange(1 + num_points // config.hop).mul_(config.hop).clamp_(max=num_points - 1)
    is_audible_BN = waveforms_BT[:, centre_N] != 0  # enough for most sounds
    unsettled_S = is_audible_BN.logical_not().any(dim=1).nonzero()[:, 0]
    # NumPy stops at the first point that is not 0 and takes a thirtieth of torch's time.
    points_SNW = _points_of_frames(waveforms_BT[unsettled_S], config).numpy()
    return is_audible_BN.index_copy_(0, unsettled_S, torch.from_numpy(points_SNW.any(axis=2)))


def _points_of_frames(waveforms_BT: Tensor, config: MelConfig) -> Tensor:
    """Return whether each point under each frame's window is not 0, (B, N, W - 1) bool."""
    half = config.n_fft // 2
    return F.pad(waveforms_BT.bool(), (half - 1, half)).unfold(1, config.n_fft - 1, config.hop)


def log_mel(power_BMN: Tensor, config: MelConfig) -> Tensor:
    """Return the normalised doubled decibels of a result of `power_mel`, with the same shape and dtype.

    x is 20 log10 of the power, raised to at least -100 and to at least `range_db` below the maximum of its sound. The
    result is (x - mean) / std; pure silence gives -0.823.
    """
    decibels_BMN = _log(power_BMN.clamp(min=_FLOOR)).mul_(20 / math.log(10))
    least_B11 = decibels_BMN.amax(dim=(1, 2), keepdim=True) - config.range_db
    memory = decibels_BMN if can_use_numpy(decibels_BMN) else None
    return torch.maximum(decibels_BMN, least_B11, out=memory).sub_(config.mean).div_(config.std)


def _log(x: Tensor) -> Tensor:
    """Return the natural logarithm; it may overwrite x."""
    return torch.from_numpy(np.log(x.numpy(), out=x.numpy())) if can_use_numpy(x) else x.log()


@dataclass(frozen=True)
class _Bank:
    """The weights of neighbouring mel bands for the parts `lowest` to `highest` - 1 of the spectrum; others are 0."""

    lowest: int
    highest: int
    weights_XM: Tensor


@dataclass(frozen=True)
class _Filters:
    window_W: Tensor
    banks: tuple[_Bank, ...]
    num_mels: int

    @cached_property
    def banks_of_numpy(self) -> list[tuple[int, int, slice, _Array]]:
        """Return (lowest, highest, bands, weights) of each bank on a CPU; the weights share the tensor's memory."""
        bounds = itertools.accumulate((bank.weights_XM.shape[1] for bank in self.banks), initial=0)
        return [
            (bank.lowest, bank.highest, slice(*bands), bank.weights_XM.numpy())
            for bank, bands in zip(self.banks, itertools.pairwise(bounds), strict=True)
        ]


@cache  # a recorded step reads them, so none may be freed
def _filters(config: MelConfig, device: torch.device, dtype: torch.dtype) -> _Filters:
    from torchaudio import functional as audio  # here, because no run on pictures needs it

    with torch.inference_mode(False):  # the cache must not keep inference tensors: training could not use them
        window = torch.hann_window(config.n_fft, dtype=torch.float64)
        weights_FM: Tensor = audio.melscale_fbanks(
            config.n_fft // 2 + 1,
            f_min=0.0,
            f_max=config.sample_rate / 2,
            n_mels=config.num_mels,
            sample_rate=config.sample_rate,
            norm="slaney",
            mel_scale="slaney",
        ).to(device, dtype)
        banks = []
        for part_FM in torch.split(weights_FM, _BANDS_A_BANK, dim=1):
            used = part_FM.any(dim=1).nonzero()
            lowest, highest = int(used.min()), int(used.max()) + 1
            weights_MX = part_FM[lowest:highest].T.repeat_interleave(2, dim=1)  # this layout is a third faster on a CPU
            banks.append(_Bank(2 * lowest, 2 * highest, weights_MX.T))
        return _Filters(window.to(device, dtype), tuple(banks), config.num_mels)
