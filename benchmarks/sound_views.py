"""Expert views of sounds, a batch at a time, against NumPy and librosa one sound after the other.

    python -m benchmarks.sound_views [--batch-size B] [--rounds R] [--out JSON]

The peers make one view of each waveform of 50,000 points at 48 kHz: masks and noise on the spectrogram; crop and white
noise on the waveform, then the spectrogram. "as published" is the way of the code by Tamkin et al. (2022), which puts
a sound among NumPy's zeros, so in float64, before librosa gets it; "in float32" is kinder to librosa. Ratios are to the
first. Peers take turns, round by round, so that a machine that slows down does so for all. One thread, and its
processor time.
`--out` files all that was measured, with the command, the commit and the load of the machine before it began.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import librosa
import numpy as np
import torch
from torch import Tensor

from benchmarks import record
from benchmarks.sounds import NUM_POINTS, Sound, librosa_log_mel
from data_pipeline.audio.log_mel import AUDIOMNIST
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import run_command
from trainer.views.expert_audio import Spectral, SpectralConfig, Waveform, WaveformConfig, clean_spectrogram


def one_by_one(waveforms_BT: Tensor, view: Callable[[Sound], Sound]) -> Mapping[str, Callable[[], object]]:
    """A view of each waveform in turn, in either precision."""
    waveforms = waveforms_BT.numpy()
    return {
        "librosa, as published": lambda: np.stack([view(waveform.astype(np.float64)) for waveform in waveforms]),
        "librosa, in float32": lambda: np.stack([view(waveform) for waveform in waveforms]),
    }


def spectral_peers(waveforms_BT: Tensor, keys: DrawKeys) -> Mapping[str, Callable[[], object]]:
    rng = np.random.default_rng(0)
    policy = Spectral(SpectralConfig(), AUDIOMNIST)

    def view(waveform: Sound) -> Sound:
        power = librosa.feature.melspectrogram(
            y=waveform, sr=AUDIOMNIST.sample_rate, n_fft=AUDIOMNIST.n_fft, hop_length=AUDIOMNIST.hop, n_mels=64
        )
        for axis_of_power in (power, power.T):
            width = rng.integers(40)
            first = rng.integers(64 - width)
            axis_of_power[first : first + width] = 0
        decibels = librosa.power_to_db(power**2).astype(np.float32)
        decibels += rng.standard_normal((64, 64), dtype=np.float32) * np.float32(0.25 * AUDIOMNIST.std)
        normalised: Sound = (decibels - AUDIOMNIST.mean) / AUDIOMNIST.std
        return normalised

    return {**one_by_one(waveforms_BT, view), "ours": lambda: policy(waveforms_BT, keys)}


def waveform_peers(waveforms_BT: Tensor, keys: DrawKeys) -> Mapping[str, Callable[[], object]]:
    rng = np.random.default_rng(0)
    policy = Waveform(WaveformConfig(), AUDIOMNIST)

    def crop(waveform: Sound) -> Sound:
        length = int(NUM_POINTS * rng.uniform(0.08, 1))
        first = rng.integers(NUM_POINTS - length + 1)
        kept = np.zeros_like(waveform)
        kept[first : first + length] = waveform[first : first + length]
        return kept

    def add_noise(waveform: Sound) -> Sound:
        noisy: Sound = waveform + np.fft.irfft(rng.standard_normal(NUM_POINTS // 2 + 1, waveform.dtype), n=NUM_POINTS)
        return noisy

    def view(waveform: Sound) -> Sound:
        for operation in rng.permutation(np.array([crop, add_noise])):
            waveform = operation(waveform)
        return librosa_log_mel(waveform)

    return {
        **one_by_one(waveforms_BT, view),
        "ours": lambda: policy(waveforms_BT, keys),
        "ours, without crop and noise": lambda: clean_spectrogram(waveforms_BT, AUDIOMNIST),
    }


def rates(calls: Mapping[str, Callable[[], object]], num_sounds: int) -> record.Peers:
    """Each call as a measurement: sounds in a second of processor time. It is made once before, unmeasured."""

    def rate(call: Callable[[], object]) -> float:
        return num_sounds / record.cpu_seconds(call)

    for call in calls.values():
        call()
    return {name: partial(rate, call) for name, call in calls.items()}


def main() -> None:
    parser = record.benchmark_parser("expert views of sounds against NumPy and librosa one by one", rounds=7)
    parser.add_argument("--batch-size", type=int, default=128, metavar="B")
    args = parser.parse_args()
    before = record.on_one_core(packages=["torch", "librosa", "numpy", "soxr"])
    waveforms_BT = 0.1 * torch.randn(args.batch_size, NUM_POINTS, generator=torch.Generator().manual_seed(0))
    keys = DrawKeys(seed=0, epoch=0, index_B=torch.arange(args.batch_size), view=0)
    groups = {
        "spectral views": (spectral_peers(waveforms_BT, keys), "librosa, as published", 8),
        "waveform views": (waveform_peers(waveforms_BT, keys), "librosa, as published", 8),
    }
    lines = (
        record.ratio_line(title, rates(calls, args.batch_size), against=against, target=target)
        for title, (calls, against, target) in groups.items()
    )
    results = record.measure_each(lines, num_rounds=args.rounds)
    settings = {"rounds": args.rounds, "batch_size": args.batch_size}
    record.save(args.out, {**before, **settings, "lines": results})


if __name__ == "__main__":
    run_command(main)
