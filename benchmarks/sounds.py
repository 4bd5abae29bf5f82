"""Speech clips to normalised spectrograms of speech and background, a batch at a time: our way and librosa's.

Every peer cuts or fills up each clip, puts the first or last points of one of three recordings behind it, takes the
log-mel spectrogram of the sum and normalises it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import librosa
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.audio.log_mel import AUDIOMNIST, log_mel, power_mel
from data_pipeline.audio.waveform import fit_length
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.overlays.noise import Noise
from data_pipeline.sources.background import procedural_sounds

VOLUME = 0.05
NUM_POINTS = AUDIOMNIST.num_points

Sound = NDArray[np.floating[Any]]  # points of a waveform


def spectrogram_peers(batch_size: int) -> Mapping[str, Callable[[], object]]:
    """Each makes the spectrograms of one batch of clips at 48 kHz, a third of the crop to the whole of it long.

    "as published" is the way of the code by Tamkin et al. (2022): the whole recording is scaled at every access, and
    the sum is in float64. "prepared" is the best that librosa is given here: recordings cut and scaled beforehand, and
    float32. Raises `AssertionError` unless our spectrograms are librosa's.
    """
    rng = np.random.default_rng(0)
    lengths = rng.integers(NUM_POINTS // 3, NUM_POINTS, batch_size)
    clips = [(0.1 * rng.standard_normal(length)).astype(np.float32) for length in lengths]
    clips_of_torch = [torch.from_numpy(clip) for clip in clips]
    sounds = procedural_sounds(0, sample_rate=AUDIOMNIST.sample_rate, num_points=NUM_POINTS)
    recordings = [sound.numpy() for sound in sounds]
    noise = Noise.of(sounds, num_points=NUM_POINTS, volume=VOLUME, crop="first_or_last")
    keys = DrawKeys(seed=0, epoch=0, index_B=torch.arange(batch_size), view=0)
    is_last_B = torch.zeros(batch_size, dtype=torch.bool)

    def mixed() -> Tensor:
        waveforms_BT: Tensor = noise(fit_length(clips_of_torch, NUM_POINTS, last_B=is_last_B), keys).inputs
        return waveforms_BT

    def ours() -> Tensor:
        return log_mel(power_mel(mixed(), AUDIOMNIST), AUDIOMNIST)

    def as_published() -> list[Sound]:
        spectrograms = []
        for clip in clips:
            recording = recordings[rng.integers(3)]
            behind = first_and_last(recording * (VOLUME / np.max(np.abs(recording))))[rng.integers(2)]
            waveform = np.zeros(NUM_POINTS)
            waveform[: len(clip)] = clip
            spectrograms.append(librosa_log_mel(waveform + behind))
        return spectrograms

    scaled = [recording * (VOLUME / np.max(np.abs(recording))) for recording in recordings]

    def prepared() -> list[Sound]:
        spectrograms = []
        for clip in clips:
            waveform = first_and_last(scaled[rng.integers(3)])[rng.integers(2)].copy()
            waveform[: len(clip)] += clip
            spectrograms.append(librosa_log_mel(waveform))
        return spectrograms

    of_librosa = np.stack([librosa_log_mel(waveform) for waveform in mixed()[:8].numpy()])
    np.testing.assert_allclose(ours()[:8].numpy(), of_librosa, atol=1e-3)
    return {"librosa, as published": as_published, "librosa, prepared, float32": prepared, "ours": ours}


def first_and_last(recording: Sound) -> tuple[Sound, Sound]:
    return recording[:NUM_POINTS], recording[-NUM_POINTS:]


def librosa_log_mel(waveform: Sound) -> Sound:
    """The published spectrogram (Tamkin et al. 2022) by librosa: the power is squared once more before decibels."""
    power = librosa.feature.melspectrogram(
        y=waveform,
        sr=AUDIOMNIST.sample_rate,
        n_fft=AUDIOMNIST.n_fft,
        hop_length=AUDIOMNIST.hop,
        n_mels=AUDIOMNIST.num_mels,
        pad_mode="constant",
    )
    spectrogram: Sound = (librosa.power_to_db(power**2) - AUDIOMNIST.mean) / AUDIOMNIST.std
    return spectrogram
