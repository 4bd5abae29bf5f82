"""Expert views of sounds of Tamkin et al. (2022), which change the spectrogram or the waveform.

Input: waveforms and the keys of their draws. Output: normalised log-mel spectrograms of one channel, the input of the
encoder. `Spectral` silences a range of mel bands and a range of frames, and adds noise to the normalised decibels.
`Waveform` silences everything outside a crop and adds white noise, in random order. Before, it can change speed and
pitch, which the paper names and its published code does not do.

Legend: B samples, T points of a waveform, K points up to the middle (or tries of a mask), M mel bands, N frames.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from data_pipeline.audio.log_mel import MelConfig, audible_frames, frames_that_hear, log_mel, power_mel
from data_pipeline.core.counter_rng import DrawKeys, normal_pairs, uniform
from data_pipeline.core.random_crop import between
from data_pipeline.core.schema import Ascending, CountOrZero, Deviation, PositiveShare
from trainer.views.inputs import check_keys, rows_of
from trainer.views.policy import BaseViewsConfig, ViewsInputs
from trainer.views.speed_and_pitch import change_speed_and_pitch

# `purpose` in `data_pipeline.core.counter_rng`, above the purposes of a viewmaker, which may use the same keys.
_MASKS, _SPECTRAL_NOISE, _WAVEFORM, _WHITE_NOISE, _SPEED_AND_PITCH = range(90, 95)
Speed = Annotated[float, Field(ge=0.5, le=2)]
Semitones = Annotated[float, Field(ge=-12, le=12)]
_POINTS_ON_CPU: Final = 1 << 19  # points that a CPU augments at once: 2 MiB in float32, which fits its cache


class _ForSounds(BaseViewsConfig):
    """The base of the configs of views for sounds alone."""

    takes_pictures: ClassVar[bool] = False
    takes_sounds: ClassVar[bool] = True


class SpectralConfig(_ForSounds):
    """The config of views of spectrograms: masks of bands and frames, and noise.

    The width of a mask is uniform from 0 to its maximum; a maximum of 0 switches the mask off. A mask that changes
    nothing, because its width is 0 or because it covers only silence, is drawn again, up to `mask_tries` draws: 4 as
    published, 1 for a single draw.

    noise_std: the standard deviation of the noise on the normalised spectrogram; 0 switches it off.
    """

    kind: Literal["spectral"] = "spectral"
    max_masked_bands: CountOrZero = 39
    max_masked_frames: CountOrZero = 39
    mask_tries: Annotated[int, Field(ge=1, le=100)] = 4
    noise_std: Deviation = 0.25

    def build(self, given: ViewsInputs) -> Spectral:
        assert given.mel is not None
        return Spectral(self, given.mel)

    def check_medium(self, mel: MelConfig | None) -> None:
        super().check_medium(mel)
        assert mel is not None
        for name, widest, size in (
            ("max_masked_bands", self.max_masked_bands, mel.num_mels),
            ("max_masked_frames", self.max_masked_frames, mel.num_frames),
        ):
            if widest >= size:
                raise ValueError(f"{name} is {widest}, but it must be below {size}, the size of the spectrogram")


class WaveformConfig(_ForSounds):
    """The config of views of waveforms: a crop and noise.

    kept: the share of the points that a crop keeps, drawn uniformly from this range; None for no crop.
    noise_std: the standard deviation of the noise. The published noise is the inverse Fourier transform of normal
        numbers; the default is its deviation over 50,000 points, for any number of points.
    speed: the factor of the speed, which changes the pitch as much, drawn uniformly from this range; None for no
        change. A sound that becomes longer loses its end.
    semitones: the change of pitch at the same speed, drawn uniformly from this range; None for no change.
    """

    kind: Literal["waveform"] = "waveform"
    kept: Annotated[tuple[PositiveShare, PositiveShare], Ascending] | None = (0.08, 1.0)
    noise_std: Deviation = 50_000**-0.5
    speed: Annotated[tuple[Speed, Speed], Ascending] | None = None
    semitones: Annotated[tuple[Semitones, Semitones], Ascending] | None = None

    @property
    def highest(self) -> float:
        """Return the largest factor of pitch, and of speed and pitch together, or 1 if that is larger."""
        speed, semitones = (self.speed or (1, 1))[1], (self.semitones or (0, 0))[1]
        return float(max(1, speed) * 2 ** max(0, semitones / 12))

    def build(self, given: ViewsInputs) -> Waveform:
        assert given.mel is not None
        return Waveform(self, given.mel)


@dataclass(frozen=True)
class MaskDraws:
    """The ranges that are silenced, in whole bands and frames, (B,) int64 each."""

    first_band_B: Tensor
    num_bands_B: Tensor
    first_frame_B: Tensor
    num_frames_B: Tensor


@dataclass(frozen=True)
class WaveformDraws:
    """The random parameters of views of waveforms.

    Attributes:
        first_B, length_B: int64, the range of points that the crop keeps.
        crops_last_B: bool, whether the crop comes after the noise, so that it crops the noise too.
        speed_B, pitch_B: float64, the factors of speed and pitch, if one of them is changed; see
            `change_speed_and_pitch`. A pitch is None if only the speed is changed.
    """

    first_B: Tensor
    length_B: Tensor
    crops_last_B: Tensor
    speed_B: Tensor | None = None
    pitch_B: Tensor | None = None


class Spectral(nn.Module):
    """A view policy on spectrograms: a module `policy(waveforms_BT, keys, masks_BHW) -> views_B1MN` without parameters.

    Its draws depend on `keys` and on the silent frames of the sound.
    """

    def __init__(self, config: SpectralConfig, mel: MelConfig) -> None:
        super().__init__()
        self.config, self.mel = config, mel

    @torch.no_grad()
    def forward(self, waveforms_BT: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        """Return one view of each sound: (B, T) float32 or float64 to (B, 1, M, N) of the same dtype, normalised."""
        check_waveforms(waveforms_BT, self.mel)
        check_keys(waveforms_BT, keys)
        audible_BN = audible_frames(waveforms_BT, self.mel) if self.config.mask_tries > 1 else None
        draws = draw_masks(self.config, keys, self.mel, audible_BN=audible_BN)
        needed_BN = ~_inside(draws.first_frame_B, draws.num_frames_B, self.mel.num_frames)
        power_BMN = mask_power(power_mel(waveforms_BT, self.mel, needed_BN=needed_BN), draws)
        views_BMN = log_mel(power_BMN, self.mel)
        if self.config.noise_std:
            noise_BX = _normals(keys, power_BMN[0].numel(), purpose=_SPECTRAL_NOISE)
            views_BMN.add_(noise_BX.view_as(views_BMN), alpha=self.config.noise_std)
        return views_BMN[:, None]


class Waveform(nn.Module):
    """A view policy on waveforms: a module `policy(waveforms_BT, keys, masks_BHW) -> views_B1MN` without parameters.

    It changes speed and pitch. Then it crops and adds noise, in random order. Its draws depend on `keys` alone.
    """

    def __init__(self, config: WaveformConfig, mel: MelConfig) -> None:
        super().__init__()
        self.config, self.mel = config, mel

    @torch.no_grad()
    def forward(self, waveforms_BT: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        """Return one view of each sound: (B, T) float32 or float64 to (B, 1, M, N) of the same dtype, normalised."""
        check_waveforms(waveforms_BT, self.mel)
        check_keys(waveforms_BT, keys)
        draws = draw_waveform(self.config, keys, num_points=waveforms_BT.shape[1])
        needed_BN = frames_that_hear(draws.first_B, draws.length_B, self.mel)
        if self.config.noise_std:
            needed_BN |= ~draws.crops_last_B[:, None]
        power_BMN = power_mel(self._augment(waveforms_BT, keys, draws), self.mel, needed_BN=needed_BN)
        return log_mel(power_BMN, self.mel)[:, None]

    @torch.no_grad()
    def augment(self, waveforms_BT: Tensor, keys: DrawKeys) -> Tensor:
        """Return the changed waveforms, with the same shape and dtype, for a policy that follows this one."""
        check_waveforms(waveforms_BT, self.mel)
        check_keys(waveforms_BT, keys)
        return self._augment(waveforms_BT, keys, draw_waveform(self.config, keys, num_points=waveforms_BT.shape[1]))

    def _augment(self, waveforms_BT: Tensor, keys: DrawKeys, draws: WaveformDraws) -> Tensor:
        if waveforms_BT.device.type != "cpu":
            return crop_and_add(self._change(waveforms_BT, draws), self._noise(keys, waveforms_BT.dtype), draws)
        # A CPU does a few at a time, so that their numbers stay in the cache: twice as fast.
        views_BT = torch.empty_like(waveforms_BT)
        size = max(1, _POINTS_ON_CPU // waveforms_BT.shape[1])
        for first in range(0, len(waveforms_BT), size):
            rows = slice(first, first + size)
            part_keys, part_draws = keys.rows(rows), rows_of(draws, rows)
            noise_BT = self._noise(part_keys, waveforms_BT.dtype)
            views_BT[rows] = crop_and_add(self._change(waveforms_BT[rows], part_draws), noise_BT, part_draws)
        return views_BT

    def _change(self, waveforms_BT: Tensor, draws: WaveformDraws) -> Tensor:
        if draws.speed_B is None:
            return waveforms_BT
        return change_speed_and_pitch(waveforms_BT, draws.speed_B, draws.pitch_B, highest=self.config.highest)

    def _noise(self, keys: DrawKeys, dtype: torch.dtype) -> Tensor | None:
        if not self.config.noise_std:
            return None
        normal_BK = _normals(keys, self.mel.num_points // 2 + 1, purpose=_WHITE_NOISE).to(dtype)
        return white_noise(normal_BK, self.mel.num_points, std=self.config.noise_std)


def clean_spectrogram(waveforms_BT: Tensor, mel: MelConfig) -> Tensor:
    """Return the spectrogram of each sound without a view: (B, T) to (B, 1, M, N) of the same dtype, normalised.

    Raises like `check_waveforms`.
    """
    check_waveforms(waveforms_BT, mel)
    return log_mel(power_mel(waveforms_BT, mel), mel)[:, None]


def check_waveforms(waveforms_BT: Tensor, mel: MelConfig) -> None:
    """Raise `ValueError` if the waveforms are not (B, T) with T = `mel.num_points`."""
    if waveforms_BT.dim() != 2 or waveforms_BT.shape[1] != mel.num_points:
        raise ValueError(f"views of sounds need waveforms (B, {mel.num_points}), got {tuple(waveforms_BT.shape)}")


def draw_masks(
    config: SpectralConfig, keys: DrawKeys, mel: MelConfig, *, audible_BN: Tensor | None = None
) -> MaskDraws:
    """Draw the masks of one view for each key.

    Widths are uniform from 0 to the maximum, and first cells are uniform from 0 to size - width - 1. As published, the
    last band and the last frame are therefore never masked.

    Takes the first of `config.mask_tries` draws that changes the spectrogram, or the first draw if none does. A mask of
    bands changes it if its width is above 0, and a mask of frames if it covers a frame that is not silent. `audible_BN`
    marks the frames that are not silent (bool; None: all).
    """
    shares_BK4 = uniform(keys, 4 * config.mask_tries, purpose=_MASKS).double().view(-1, config.mask_tries, 4)
    band_width_BK, band_BK, frame_width_BK, frame_BK = shares_BK4.unbind(dim=2)
    num_bands_BK = _pick(band_width_BK, config.max_masked_bands + 1)
    num_frames_BK = _pick(frame_width_BK, config.max_masked_frames + 1)
    first_band_BK = _pick(band_BK, mel.num_mels - num_bands_BK)
    first_frame_BK = _pick(frame_BK, mel.num_frames - num_frames_BK)
    num_audible_BK = num_frames_BK
    if audible_BN is not None:
        before_BX = F.pad(audible_BN.long().cumsum(dim=1), (1, 0))  # the number of audible frames before a frame
        num_audible_BK = before_BX.gather(1, first_frame_BK + num_frames_BK) - before_BX.gather(1, first_frame_BK)
    band_try_B1, frame_try_B1 = _first_true(num_bands_BK > 0), _first_true(num_audible_BK > 0)
    return MaskDraws(
        first_band_B=first_band_BK.gather(1, band_try_B1)[:, 0],
        num_bands_B=num_bands_BK.gather(1, band_try_B1)[:, 0],
        first_frame_B=first_frame_BK.gather(1, frame_try_B1)[:, 0],
        num_frames_B=num_frames_BK.gather(1, frame_try_B1)[:, 0],
    )


def mask_power(power_BMN: Tensor, draws: MaskDraws) -> Tensor:
    """Return a copy of the power, (B, M, N), with 0 in the drawn bands and frames. The power must be finite."""
    _, M, N = power_BMN.shape
    kept_BM = (~_inside(draws.first_band_B, draws.num_bands_B, M)).to(power_BMN.dtype)
    kept_BN = (~_inside(draws.first_frame_B, draws.num_frames_B, N)).to(power_BMN.dtype)
    return (kept_BM[:, :, None] * kept_BN[:, None, :]).mul_(power_BMN)  # a fifth of the time of filling by a mask


def draw_waveform(config: WaveformConfig, keys: DrawKeys, *, num_points: int) -> WaveformDraws:
    """Draw the parameters of one view for each key, for waveforms of `num_points`.

    The first point of a crop is uniform from 0 to num_points - length - 1. As published, no crop therefore holds the
    last point, unless it has the whole length and begins at 0.
    """
    share_B, place_B, order_B = uniform(keys, 3, purpose=_WAVEFORM).double().unbind(dim=1)
    length_B = torch.floor(num_points * between(config.kept or (1.0, 1.0), share_B)).long()
    speed_B = pitch_B = None
    if config.speed is not None or config.semitones is not None:
        speed_B, pitch_B = uniform(keys, 2, purpose=_SPEED_AND_PITCH).double().unbind(dim=1)
        speed_B = between(config.speed or (1.0, 1.0), speed_B)
        pitch_B = None if config.semitones is None else torch.exp2(between(config.semitones, pitch_B) / 12)
    return WaveformDraws(
        speed_B=speed_B,
        pitch_B=pitch_B,
        first_B=_pick(place_B, (num_points - length_B).clamp(min=1)),
        length_B=length_B,
        crops_last_B=order_B < 0.5,
    )


def white_noise(normal_BK: Tensor, num_points: int, *, std: float) -> Tensor:
    """Return mirrored noise, (B, T = num_points), from standard normal numbers, (B, K = T // 2 + 1).

    It has the distribution of the published noise, the inverse Fourier transform of as many real normal numbers: it is
    equal when played backwards, and its points are normal with deviation `std` (sqrt(2) `std` for the first point and
    the middle point, which are their own mirror images).

    No transform is computed. With independent points, the constant part and the part that alternates from point to
    point would have twice the variance of the published noise, so both are scaled down.
    """
    num_half = normal_BK.shape[1]
    noise_BT = normal_BK.new_empty(len(normal_BK), num_points)
    half_BK = torch.mul(normal_BK, std, out=noise_BT[:, :num_half])
    # Even points and odd points have separate means: a pair of them is one complex number.
    if num_points % 2:
        own_mirrors_BX, parts_BX = half_BK[:, :1], half_BK
    else:
        noise_BT[:, num_half : num_half + num_half % 2] = 0  # completes the last pair
        own_mirrors_BX = half_BK[:, :: num_points // 2]
        parts_BX = torch.view_as_complex(noise_BT[:, : num_half + num_half % 2].view(len(noise_BT), -1, 2))
    own_mirrors_BX *= math.sqrt(2) / 2  # they occur once, all others twice
    num_of_part = num_points / (1 + parts_BX.is_complex())
    mean_B1 = parts_BX.sum(dim=1, keepdim=True).mul_(2 / num_of_part)
    own_mirrors_BX *= 2
    parts_BX -= mean_B1.mul_(1 - math.sqrt(0.5))
    noise_BT[:, num_half:] = half_BK[:, 1 : 1 + num_points - num_half].flip(1)
    return noise_BT


def crop_and_add(waveforms_BT: Tensor, noise_BT: Tensor | None, draws: WaveformDraws) -> Tensor:
    """Return the waveforms with 0 outside the crop, plus the noise, which is also cropped if the crop comes last."""
    kept_BT = _inside(draws.first_B, draws.length_B, waveforms_BT.shape[1]).to(waveforms_BT.dtype)
    cropped_BT = waveforms_BT * kept_BT
    if noise_BT is None:
        return cropped_BT
    is_whole_B1 = (~draws.crops_last_B)[:, None].to(waveforms_BT.dtype)
    return cropped_BT.addcmul_(noise_BT, kept_BT.clamp_(min=is_whole_B1))


def _normals(keys: DrawKeys, num: int, *, purpose: int) -> Tensor:
    """Return (B, num) standard normal float32 numbers in an order that differs from `normal`, which is faster."""
    return normal_pairs(keys, (num + 1) // 2, purpose=purpose).flatten(1)[:, :num]


def _inside(first_B: Tensor, length_B: Tensor, size: int) -> Tensor:
    """Return whether each cell is one of the `length_B` cells from `first_B` on, (B, size) bool."""
    cell_X = torch.arange(size, device=first_B.device, dtype=torch.int32)  # half the memory of int64, and faster
    return (cell_X >= first_B[:, None].int()) & (cell_X < (first_B + length_B)[:, None].int())


def _pick(share_X: Tensor, num: int | Tensor) -> Tensor:
    """Turn shares, uniform in [0, 1), into int64 numbers from 0 to num - 1, equally likely."""
    return torch.floor(share_X * num).long()


def _first_true(flags_BK: Tensor) -> Tensor:
    """Return the column of the first True in each row, (B, 1) int64; 0 if there is none."""
    return flags_BK.to(torch.uint8).argmax(dim=1, keepdim=True)
