"""Play sounds faster or slower, higher or lower, with an amount for each sound of a batch.

Both functions compute for a whole batch, on any device, what torchaudio computes for one amount at a time.

Legend: B samples, T points of a waveform, L points of a stretched waveform, R points of a frame, K frequencies, N
frames before stretching, Q after it.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

# The defaults of torchaudio.
_ZERO_CROSSINGS: Final = 6  # of the sinc on either side
_ROLLOFF: Final = 0.99  # the share of the band that the sinc keeps
_WINDOW: Final = 512  # points of a frame of the phase vocoder
_HOP: Final = 128  # points from one frame to the next
_SMALLEST: Final = 1e-12  # an angle that equals its sine in float32 and float64


def change_speed(waveforms_BT: Tensor, factor_B: Tensor, *, max_factor: float) -> Tensor:
    """Play each waveform `factor` times as fast, and as many times higher. Returns the same shape and dtype, (B, T).

    A sound that becomes shorter is followed by zeros; a sound that becomes longer loses its end. `factor_B` is (B,)
    float64, positive and at most `max_factor`. Equals `torchaudio.functional.speed`, which accepts a factor only if the
    new rate is a whole number. Its memory grows with the square of the new rate if the rates have no large common
    divisor.
    """
    num_points = waveforms_BT.shape[1]
    length_B = torch.full_like(factor_B, num_points)
    return _resample(waveforms_BT, factor_B, length_B, num_points, max_factor=max_factor)


def change_pitch(waveforms_BT: Tensor, semitones_B: Tensor, *, sample_rate: int, max_semitones: float) -> Tensor:
    """Play each waveform `semitones` higher at the same speed. Returns the same shape and dtype, (B, T).

    `semitones_B` is (B,) float64, at most `max_semitones` in magnitude; T is above 256. A phase vocoder stretches the
    sound, and resampling plays it faster or slower. Equals `torchaudio.functional.pitch_shift`, whose resampling has
    the limits of `torchaudio.functional.speed`. As there, raised sounds become quieter: recorded speech keeps 0.7 of
    its root mean square if it is raised by half a semitone to two, and 0.93 if it is lowered by one.
    """
    num_points = waveforms_BT.shape[1]
    slowest = 2 ** (-max_semitones / 12)
    rate_B = torch.exp2(-semitones_B / 12)
    length_B = torch.round(num_points / rate_B)
    stretched_BL = _stretch(waveforms_BT, rate_B, length_B, slowest=slowest)
    factor_B = torch.floor(sample_rate / rate_B) / sample_rate
    return _resample(stretched_BL, factor_B, length_B, num_points, max_factor=1 / slowest)


def _resample(x_BL: Tensor, factor_B: Tensor, length_B: Tensor, num_points: int, *, max_factor: float) -> Tensor:
    """Return points 0, factor, 2 factor, ... of each sound, (B, num_points); 0 beyond its `length`.

    Uses a sinc under a Hann window. For a factor above 1 the window is wider, which cuts the band that would alias.
    """
    reach = math.ceil(_ZERO_CROSSINGS * max(1.0, max_factor) / _ROLLOFF)
    padded_BL = F.pad(x_BL, (reach, reach + 1))
    band_B1 = _ROLLOFF * factor_B.clamp(min=1)[:, None].reciprocal()
    at_BT = torch.arange(num_points, device=x_BL.device, dtype=torch.float64) * factor_B[:, None]
    before_BT = at_BT.floor()
    is_heard_BT = at_BT < length_B[:, None]
    past_BT = (at_BT - before_BT).mul_(math.pi * band_B1).to(x_BL.dtype)
    index_BT = before_BT.long().clamp_(max=x_BL.shape[1] - 1)
    # The sine of the sinc and the cosine of the window at one tap follow from another tap by the sum of two angles.
    sin_BT, cos_BT = _sin_cos(past_BT, x_BL.dtype)
    slow_sin_BT, slow_cos_BT = _sin_cos(past_BT / _ZERO_CROSSINGS, x_BL.dtype)
    sum_BT = torch.zeros_like(past_BT)
    for tap in range(1 - reach, reach + 1):
        turn_B1 = tap * math.pi * band_B1
        sin_B1, cos_B1 = _sin_cos(turn_B1, x_BL.dtype)
        slow_sin_B1, slow_cos_B1 = _sin_cos(turn_B1 / _ZERO_CROSSINGS, x_BL.dtype)
        angle_BT = past_BT - turn_B1.to(x_BL.dtype)
        if tap in (0, 1):  # the angle may be so small that the sum of angles loses its sine
            weight_BT = angle_BT.abs_().clamp_(min=_SMALLEST).sin()
        else:
            weight_BT = (sin_BT * cos_B1).addcmul_(cos_BT, sin_B1, value=-1)
        weight_BT.div_(angle_BT)
        weight_BT.mul_((slow_cos_BT * slow_cos_B1).addcmul_(slow_sin_BT, slow_sin_B1).add_(1))
        if not -_ZERO_CROSSINGS < tap <= _ZERO_CROSSINGS:  # the tap may be beyond the window
            weight_BT.masked_fill_(angle_BT.abs_() > _ZERO_CROSSINGS * math.pi, 0)
        sum_BT.addcmul_(weight_BT, padded_BL[:, tap + reach :].gather(1, index_BT), value=0.5)
    sum_BT.mul_(band_B1.to(x_BL.dtype)).mul_(is_heard_BT)
    # With a factor of 1 the sound does not change, as in torchaudio; the filter would cut the top of its band.
    unchanged_BT = F.pad(x_BL, (0, max(0, num_points - x_BL.shape[1])))[:, :num_points]
    return torch.where(factor_B[:, None] == 1, unchanged_BT, sum_BT)


def _sin_cos(angle: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return angle.sin().to(dtype), angle.cos().to(dtype)


def _stretch(waveforms_BT: Tensor, rate_B: Tensor, length_B: Tensor, *, slowest: float) -> Tensor:
    """Stretch each sound to 1 / rate of its duration at the same pitch: (B, L), with 0 from its `length` on.

    Rates are at least `slowest`. The phase vocoder (Flanagan and Golden 1966) takes a frame every `rate` frames. It
    interpolates magnitudes between two frames, and advances phases as between these frames of the sound.
    """
    window = torch.hann_window(_WINDOW, device=waveforms_BT.device, dtype=waveforms_BT.dtype)
    spectrum_BKN = torch.stft(
        waveforms_BT, _WINDOW, _HOP, window=window, center=True, pad_mode="reflect", return_complex=True
    )
    num_frames = spectrum_BKN.shape[2]
    max_frames = math.ceil(num_frames / slowest) + 1
    time_BQ = torch.arange(max_frames, device=waveforms_BT.device) * rate_B[:, None]
    is_heard_BQ = time_BQ < num_frames
    before_BQ = time_BQ.long().clamp_(max=num_frames)
    share_B1Q = (time_BQ - before_BQ).to(waveforms_BT.dtype)[:, None]

    # Two frames of silence follow the last one.
    magnitude_BKN, phase_BKN = (F.pad(part, (0, 2)) for part in (spectrum_BKN.abs(), spectrum_BKN.angle()))
    before_BKQ = before_BQ[:, None].expand(-1, spectrum_BKN.shape[1], -1)
    size_BKQ = magnitude_BKN.gather(2, before_BKQ).lerp_(magnitude_BKN.gather(2, before_BKQ + 1), share_B1Q)
    advance_BKQ = phase_BKN.diff(dim=2).gather(2, before_BKQ)
    turned_BKQ = torch.cat([phase_BKN[..., :1], advance_BKQ[..., :-1]], dim=2).cumsum(dim=2)
    size_BKQ *= is_heard_BQ[:, None]

    frames_BRQ = torch.fft.irfft(torch.polar(size_BKQ, turned_BKQ), n=_WINDOW, dim=1) * window[:, None]
    weights_BRQ = window.square()[:, None] * is_heard_BQ[:, None].to(window.dtype)
    sum_BL, weight_BL = (_overlap_add(part)[:, _WINDOW // 2 :] for part in (frames_BRQ, weights_BRQ))
    point_L = torch.arange(sum_BL.shape[1], device=waveforms_BT.device)
    is_sound_BL = (weight_BL > 1e-11) & (point_L < length_B[:, None])
    return torch.where(is_sound_BL, sum_BL / weight_BL, 0)


def _overlap_add(frames_BRQ: Tensor) -> Tensor:
    num_points = (frames_BRQ.shape[2] - 1) * _HOP + _WINDOW
    added_B11L: Tensor = F.fold(frames_BRQ, (1, num_points), (1, _WINDOW), stride=(1, _HOP))
    return added_B11L[:, 0, 0]
