"""Generated melodies of ten kinds, which stand in for spoken digits: they need no download and are quick to make.

Only the rise and fall of the notes shows the kind. Pitch, pace, loudness, timbre, start and hiss are drawn from the
same distributions for all kinds, so that no band or moment of the spectrogram shows the kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from data_pipeline.audio.log_mel import FSDD
from data_pipeline.sources.procedural import Procedural
from data_pipeline.sources.silence import SPEECH

SAMPLE_RATE: Final = FSDD.sample_rate
_NUM_HARMONICS = 8
_STEP = 7  # semitones from a low note to a high one: a fifth

# Notes of each kind, in steps of a fifth above the lowest.
MELODIES: Final[Mapping[str, tuple[float, ...]]] = {
    "flat": (0, 0, 0),
    "rise": (0, 0.5, 1),
    "fall": (1, 0.5, 0),
    "arch": (0, 1, 0),
    "dip": (1, 0, 1),
    "early_rise": (0, 1, 1),
    "late_rise": (0, 0, 1),
    "early_fall": (1, 0, 0),
    "late_fall": (1, 1, 0),
    "zigzag": (0, 1, 0, 1),
}


def sing(notes: tuple[float, ...], rng: Generator) -> NDArray[np.int16]:
    """Generate one melody: (T,) int16 at 8 kHz, 0.45 to 1.15 s."""
    num_points = int(SAMPLE_RATE * rng.uniform(0.45, 1.15))
    start = rng.uniform(0, 0.15) * num_points
    paces = rng.uniform(0.7, 1.3, len(notes))
    ends = start + (num_points - start) * np.cumsum(paces) / paces.sum()
    point = np.arange(num_points)
    note = np.searchsorted(ends, point, side="right").clip(max=len(notes) - 1)
    begins = np.concatenate([[start], ends[:-1]])
    within = (point - begins[note]) / (ends - begins)[note]  # from 0 to 1 in each note, below 0 before the first
    lowest = 240 * 2 ** rng.uniform(-0.6, 0.6)
    if len(set(notes)) == 1:  # any pitch between low and high; always the low one would show the kind
        lowest *= 2 ** (rng.uniform(0, _STEP) / 12)
    frequency = lowest * 2 ** (np.array(notes) * _STEP / 12)
    phase = 2 * math.pi * np.cumsum(frequency[note]) / SAMPLE_RATE
    loudness = np.where(within < 0, 0, np.minimum(within / 0.08, 1)) * np.exp(-rng.uniform(0.5, 2.5) * within)
    tilt, formant = rng.uniform(0.6, 1.6), rng.uniform(500, 2_200)
    wave = np.zeros(num_points)
    for k in range(1, _NUM_HARMONICS + 1):
        colour = k**-tilt * (0.3 + np.exp(-(((k * frequency - formant) / 500) ** 2)))
        wave += colour[note] * np.sin(k * phase + rng.uniform(0, 2 * math.pi))
    wave *= loudness
    wave *= math.exp(rng.uniform(math.log(0.03), math.log(0.3))) / np.abs(wave).max()
    wave += 10 ** rng.uniform(-4, -2.5) * rng.standard_normal(num_points)
    points: NDArray[np.int16] = np.rint(32_767 * wave.clip(-1, 1)).astype(np.int16)
    return points


class ProceduralSpeech(Procedural):
    """A source of `num_records` melodies, the ten kinds in turn."""

    description, title, kinds, draw = "procedural speech", "melody", MELODIES, sing
    num_records_of = SPEECH["procedural"][1]
    sample_rate, num_points = FSDD.sample_rate, FSDD.num_points
