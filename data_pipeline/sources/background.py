"""Background sounds behind speech: the three published recordings, or three generated sounds that need no download.

Each class is one long sound, in the order babble, traffic, machinery (Tamkin et al. 2022).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.audio.sound_file import read_sound, resample
from data_pipeline.audio.wav import LEVELS
from data_pipeline.core.errors import UserError
from data_pipeline.core.options import OVERLAY_OPTION
from data_pipeline.core.randomness import generator
from data_pipeline.sources.places import Directory

FILE_NAMES: Final = ("cafe.wav", "traffic.wav", "machinery.wav")
# The same in the published code, which states no licence of them.
_PUBLISHED_NAMES: Final = ("BabbleNoise/Babble1.wav", "DrivingcarNoise/Traffic10.wav", "MachineryNoise/Machinery1.wav")
_WHERE: Final = "https://github.com/XiluoHe/feature-dropout/tree/main/noisedata"
_SILENCE: Final = 1e-3  # of the largest magnitude: 60 dB below it
_PROCEDURAL_SECONDS = 30  # as long as the published recordings

Sound = NDArray[np.float64]  # (X,): the points of one long sound


def read_sounds(root: Path, *, sample_rate: int, num_points: int) -> list[Tensor]:
    """Read the three recordings in `root`, each a float32 sound (X,) in [-1, 1] at `sample_rate` points a second.

    A sound has as many points as librosa 0.9 returns. With Y = X * (sample_rate / rate of the file) in floating point,
    these are floor(Y), and a zero follows unless Y is whole: 30 s at 44,100 points a second become 1,440,001 at 48,000.

    Raises `UserError` with the file's name if a file is missing, is no sound, or has fewer than `num_points`
    points, which are heard behind one sample. Also if its first or last `num_points` points, which are the
    parts that are heard as published, have less than a thousandth of its largest magnitude.
    """
    names = _PUBLISHED_NAMES if (root / _PUBLISHED_NAMES[0]).is_file() else FILE_NAMES
    if missing := [name for name in names if not (root / name).is_file()]:
        raise UserError(
            f"{root} lacks {' and '.join(missing)}; name the folder of {', '.join(FILE_NAMES)}, or of {_WHERE}, by "
            f"{OVERLAY_OPTION} noise_root=DIR"
        )
    files, sounds = Directory(root), []
    for name in names:
        points_X, facts = files.decoded(name, read_sound)
        num = len(points_X) * (sample_rate / facts.sample_rate)
        resampled_X = resample(points_X / LEVELS, from_rate=facts.sample_rate, to_rate=sample_rate)[: math.floor(num)]
        sound = F.pad(torch.from_numpy(resampled_X).float(), (0, math.ceil(num) - math.floor(num)))
        if len(sound) < num_points:
            raise UserError(
                f"{root / name} gives {len(sound)} points at {sample_rate} a second, but {num_points} are needed; "
                "give a longer recording"
            )
        for part, heard in (("first", sound[:num_points]), ("last", sound[-num_points:])):
            if heard.abs().max() <= _SILENCE * sound.abs().max():
                seconds = f"{num_points / sample_rate:.2f} s"
                raise UserError(
                    f"the {part} {seconds} of {root / name} are silent, and a sample has the first or the last "
                    f"{seconds} behind it; cut the silence off, or give another recording"
                )
        sounds.append(sound)
    return sounds


def procedural_sounds(seed: int, *, sample_rate: int, num_points: int) -> list[Tensor]:
    """Generate three sounds from the arguments alone, in the form that `read_sounds` returns.

    Babble is eight voices that come and go in syllables. Traffic is a rumble that swells and fades as cars pass.
    Machinery is a hum with harmonics under a steady clatter. Each lasts 30 s, or twice `num_points` if that is longer.
    """
    num = max(_PROCEDURAL_SECONDS * sample_rate, 2 * num_points)
    sounds = []
    for name, make in (("babble", _babble), ("traffic", _traffic), ("machinery", _machinery)):
        sound = make(num, sample_rate, generator(seed, f"background {name}"))
        sounds.append(torch.from_numpy((0.9 * sound / np.abs(sound).max()).astype(np.float32)))
    return sounds


def _babble(num: int, sample_rate: int, rng: Generator) -> Sound:
    total = np.zeros(num)
    for _ in range(8):
        formant, width = rng.uniform(350, 1_800), rng.uniform(150, 500)
        voice = _noise(num, sample_rate, rng, low=formant - width, high=formant + width)
        total += voice * np.maximum(_noise(num, sample_rate, rng, low=1, high=5), 0)
    return total


def _traffic(num: int, sample_rate: int, rng: Generator) -> Sound:
    rumble = _noise(num, sample_rate, rng, low=20, high=160)
    tyres = _noise(num, sample_rate, rng, low=200, high=1_200)
    passing = np.exp(0.7 * _noise(num, sample_rate, rng, low=0.05, high=0.4))
    return passing * (rumble + 0.3 * tyres)


def _machinery(num: int, sample_rate: int, rng: Generator) -> Sound:
    time = np.arange(num) / sample_rate
    hum = sum(rng.uniform(0.3, 1) / k * np.sin(2 * np.pi * (50 * k * time + rng.random())) for k in range(1, 13))
    strokes = np.exp(-60 * (time % (1 / 11)))  # eleven a second
    return np.asarray(hum) + 1.5 * strokes * _noise(num, sample_rate, rng, low=800, high=3_500)


def _noise(num: int, sample_rate: int, rng: Generator, *, low: float, high: float) -> Sound:
    """Return (num,) Gaussian noise of standard deviation 1 that has only frequencies from `low` to `high` Hz."""
    frequency = np.fft.rfftfreq(num, 1 / sample_rate)
    kept = (frequency >= low) & (frequency <= high)
    spectrum = np.zeros(len(frequency), dtype=np.complex128)
    spectrum[kept] = rng.standard_normal((2, int(kept.sum()))).T.copy().view(np.complex128)[:, 0]
    sound = np.fft.irfft(spectrum, num)
    return np.asarray(sound / sound.std(), dtype=np.float64)
