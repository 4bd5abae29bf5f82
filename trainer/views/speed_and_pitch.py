"""Play sounds faster or slower, higher or lower, by an amount for each sound of a batch, on any device.

Legend: B samples, T points of a waveform, L points of a stretched waveform, W points of a window, K frequencies, N
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
_WINDOW, _HOP = 512, 128  # points of a frame of the phase vocoder, and from one frame to the next


def change_speed_and_pitch(waveforms_BT: Tensor, speed_B: Tensor, pitch_B: Tensor | None, *, highest: float) -> Tensor:
    """Return each waveform `speed` times as fast and as many times higher, and `pitch` times higher beyond that.

    A sound that becomes shorter is followed by zeros; one that becomes longer loses its end. `speed_B` and `pitch_B`
    (B,) are float64; `highest` is at least every pitch and every product of both. T is above 256. A pitch other than 1
    is reached as in torchaudio's `pitch_shift`: a phase vocoder stretches the sound, and it is played faster.
    """
    num_points = waveforms_BT.shape[1]
    stretched_BL = waveforms_BT if pitch_B is None else _stretch(waveforms_BT, pitch_B, highest)
    factor_B1 = (speed_B if pitch_B is None else speed_B * pitch_B)[:, None]
    reach = math.ceil(_ZERO_CROSSINGS * max(1.0, highest) / _ROLLOFF)
    padded_BL = F.pad(stretched_BL, (reach, reach + 1))
    band_B1 = (_ROLLOFF / factor_B1.clamp(min=1)).to(waveforms_BT.dtype)  # a narrower one cuts what would alias
    at_BT = torch.arange(num_points, device=waveforms_BT.device, dtype=torch.float64) * factor_B1
    index_BT = at_BT.long().clamp_(max=stretched_BL.shape[1] - 1)
    past_BT = at_BT.frac().to(waveforms_BT.dtype)
    sum_BT = torch.zeros_like(waveforms_BT)
    for tap in range(1 - reach, reach + 1):
        distance_BT = ((past_BT - tap) * band_B1).clamp_(-_ZERO_CROSSINGS, _ZERO_CROSSINGS)  # where the window is 0
        weight_BT = torch.sinc(distance_BT) * torch.cos(distance_BT * (math.pi / 2 / _ZERO_CROSSINGS)).square_()
        sum_BT.addcmul_(weight_BT, padded_BL.gather(1, index_BT + (tap + reach)))
    has_ended_BT = torch.arange(num_points, device=waveforms_BT.device) * speed_B[:, None] >= num_points
    return (sum_BT * band_B1).masked_fill_(has_ended_BT, 0)


def _stretch(waveforms_BT: Tensor, pitch_B: Tensor, longest: float) -> Tensor:
    """Stretch each sound to `pitch` times its duration at the same pitch: (B, L), with its end faded.

    The phase vocoder (Flanagan and Golden 1966) takes a frame every 1 / `pitch` frames. It interpolates magnitudes
    between two frames, and advances phases as between these frames of the sound.
    """
    window_W = torch.hann_window(_WINDOW, device=waveforms_BT.device, dtype=waveforms_BT.dtype)
    spectrum_BKN = torch.stft(waveforms_BT, _WINDOW, _HOP, window=window_W, return_complex=True)
    num_frames, num_stretched = spectrum_BKN.shape[2], math.ceil(spectrum_BKN.shape[2] * max(1.0, longest))
    time_BQ = torch.arange(num_stretched, device=waveforms_BT.device) / pitch_B[:, None]
    before_BKQ = time_BQ.long().clamp_(max=num_frames)[:, None].expand(-1, spectrum_BKN.shape[1], -1)
    share_B1Q = time_BQ.frac().to(waveforms_BT.dtype)[:, None]
    magnitude_BKN, phase_BKN = (F.pad(part, (0, 2)) for part in (spectrum_BKN.abs(), spectrum_BKN.angle()))
    size_BKQ = magnitude_BKN.gather(2, before_BKQ).lerp_(magnitude_BKN.gather(2, before_BKQ + 1), share_B1Q)
    advance_BKQ = phase_BKN.diff(dim=2).gather(2, before_BKQ)
    turned_BKQ = torch.cat([phase_BKN[..., :1], advance_BKQ[..., :-1]], dim=2).cumsum(dim=2)
    frames_BWQ = torch.fft.irfft(torch.polar(size_BKQ, turned_BKQ), n=_WINDOW, dim=1) * window_W[:, None]
    weights_1WQ = window_W.square()[None, :, None].expand(1, -1, num_stretched)
    size = (1, (num_stretched - 1) * _HOP + _WINDOW)
    added_BL, weight_1L = (
        F.fold(part, size, (1, _WINDOW), stride=(1, _HOP))[:, 0, 0, _WINDOW // 2 : -(_WINDOW // 2)]
        for part in (frames_BWQ, weights_1WQ)
    )
    return added_BL / weight_1L
