"""Read files of sounds: WAV of any kind, FLAC, OGG, MP3 and AIFF, of any rate and number of channels.

Guarantees: a WAV or FLAC that is cut off raises an error; of the others, libsndfile reads what is there. A sound of 8
or 16 bits with one channel and at the rate that is wanted keeps its points exactly. Whatever else is changed is said in
the remarks.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import IO, TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from data_pipeline.audio.wav import LEVELS

if TYPE_CHECKING:
    import soundfile

LEAST_SECONDS: Final = 0.1  # of a sound that is not remarked as short
SILENT: Final = "is silent"  # a remark
_MORE_THAN_16_BITS: Final = frozenset({"PCM_24", "PCM_32", "FLOAT", "DOUBLE"})
_UNKNOWN_SIZE: Final = 0x7FFF_0000  # a size at or above this is from a program that could not seek back to write it
_LARGEST_DENOMINATOR: Final = 1_000  # of a ratio of two rates; the filters of a larger one would fill the memory


@dataclass(frozen=True)
class SoundFacts:
    """The facts of one sound file.

    Attributes:
        format: such as "WAV", "FLAC", "OGG" or "MP3".
        coding: libsndfile's name of it, such as "PCM_24", "FLOAT" or "VORBIS".
        sample_rate: in points a second.
        num_points: of one channel.
        remarks: what is odd about the file, each as words that go on "it ...".
    """

    format: str
    coding: str
    sample_rate: int
    num_channels: int
    num_points: int
    remarks: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.num_points / self.sample_rate


def sound_facts(file: IO[bytes], *, full: bool = False) -> SoundFacts:
    """Return what a file of a sound is, by its header and its end; `full` decodes it, and says whether it is silent.

    `file` must be able to seek. Raises `ValueError` with the reason if the file is no sound, is cut off or is empty.
    """
    if full:
        return _decoded(file)[0]
    with _opened(file) as (sound, facts):
        if facts.format != "MP3":  # in which a seek decodes all before the place
            _check_length(sound.seek(facts.num_points - 1) + len(sound.read(1)), facts)
        return facts


def read_sound(data: bytes, *, sample_rate: int | None = None) -> tuple[NDArray[np.int16], SoundFacts]:
    """Decode a file of a sound to 16 bits and one channel, the mean of all, at `sample_rate` or at its own rate.

    Returns its points (T,), and the facts of the file, whose remarks also say what was changed.

    Points between two levels of 16 bits are rounded, and points beyond full scale are clipped, once, at the end.

    Raises `ValueError` with the reason if the file is no sound, is cut off, is empty, or holds what is no number.
    """
    facts, points_X = _decoded(io.BytesIO(data))
    remarks = list(facts.remarks)
    if sample_rate is not None and sample_rate != facts.sample_rate:
        points_X = resample(points_X, from_rate=facts.sample_rate, to_rate=sample_rate)
        remarks.append(f"has {facts.sample_rate} points a second and is resampled to {sample_rate}")
    return _in_16_bits(points_X), replace(facts, remarks=tuple(remarks))


def resample(points_X: NDArray[np.float64], *, from_rate: int, to_rate: int) -> NDArray[np.float64]:
    """Return a sound (X,) at another rate, in points a second, by the filter that resampy calls `kaiser_best`.

    If the ratio of the rates is no fraction of small numbers, the nearest takes its place, which is within 1e-4 of it.
    """
    from scipy import signal  # here, because it takes a third of a second, and training does not need it

    ratio = Fraction(to_rate, from_rate).limit_denominator(_LARGEST_DENOMINATOR)
    resampled: NDArray[np.float64] = signal.resample_poly(points_X, *ratio.as_integer_ratio(), window=_low_pass(ratio))
    return resampled


@cache
def _low_pass(ratio: Fraction) -> NDArray[np.float64]:
    """Return the filter of a change of rate: a sinc of 64 zero crossings."""
    from scipy import signal

    most = max(ratio.as_integer_ratio())
    window: NDArray[np.float64] = signal.firwin(2 * 64 * most + 1, 0.9475937 / most, window=("kaiser", 14.769656))
    return window


def _in_16_bits(points_X: NDArray[np.float64]) -> NDArray[np.int16]:
    levels_X: NDArray[np.float64] = np.rint(points_X * LEVELS)
    return levels_X.clip(-LEVELS, LEVELS - 1).astype(np.int16)


def _decoded(file: IO[bytes]) -> tuple[SoundFacts, NDArray[np.float64]]:
    """Return what a file is, and its points (T,) in one channel, 1 being full scale."""
    with _opened(file) as (sound, facts):
        points_XC: NDArray[np.float64] = sound.read(dtype="float64", always_2d=True)
    _check_length(len(points_XC), facts)
    if not len(points_XC):
        raise ValueError("it holds no sound")
    points_X = points_XC[:, 0] if facts.num_channels == 1 else points_XC.mean(axis=1)
    if not np.isfinite(points_X).all():
        raise ValueError("it holds points that are no finite numbers")
    remarks = list(facts.remarks)
    if np.abs(points_X).max() > 1:
        remarks.append("goes beyond full scale and is clipped")
    if not np.ptp(_in_16_bits(points_X)):
        remarks.append(SILENT)
    return replace(facts, num_points=len(points_X), remarks=tuple(remarks)), points_X


@contextmanager
def _opened(file: IO[bytes]) -> Iterator[tuple[soundfile.SoundFile, SoundFacts]]:
    """Open a file of a sound, with the facts of its header. Raises `ValueError` if it cannot be opened or read."""
    import soundfile  # here, because it takes a third of a second, and training does not need it

    _check_wav(file)
    file.seek(0)
    try:
        sound = soundfile.SoundFile(file)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"it is no sound of a known format ({error.error_string})") from None
    with sound:
        if sound.frames <= 0 or sound.samplerate <= 0:
            raise ValueError("it holds no sound")
        remarks = []
        if sound.channels > 1:
            remarks.append(f"has {sound.channels} channels, which are mixed down")
        if sound.subtype in _MORE_THAN_16_BITS:
            remarks.append(f"holds {sound.subtype}, which is rounded to 16 bits")
        if sound.frames < LEAST_SECONDS * sound.samplerate:
            remarks.append(f"is shorter than {LEAST_SECONDS} s")
        container = "WAV" if sound.format == "WAVEX" else sound.format
        facts = SoundFacts(container, sound.subtype, sound.samplerate, sound.channels, sound.frames, tuple(remarks))
        try:
            yield sound, facts
        except soundfile.LibsndfileError as error:
            raise ValueError(f"it does not decode ({error.error_string})") from None


def _check_length(num_read: int, facts: SoundFacts) -> None:
    if num_read < facts.num_points and facts.format != "MP3":  # whose length may be an estimate
        raise ValueError(f"it is cut off: {num_read} of {facts.num_points} points are there")


def _check_wav(file: IO[bytes]) -> None:
    """Raise `ValueError` if a WAV is cut off: both lengths in its header, of file and sound, are more than there is.

    Otherwise a program could not seek back to write them, and libsndfile reads what is there.
    """
    num_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    form, outer, kind = struct.unpack("<4sI4s", file.read(12).ljust(12, b"\0"))
    start = 20  # of what a chunk of a WAV holds
    while form == b"RIFF" and kind == b"WAVE" and len(header := file.read(8)) == 8:
        name, declared = struct.unpack("<4sI", header)
        if name == b"data":
            there = num_bytes - start
            if there < declared < _UNKNOWN_SIZE and outer + 8 > num_bytes:
                raise ValueError(f"it is cut off: {there} of {declared} bytes of sound are there")
            return
        start += declared + declared % 2 + 8
        file.seek(start - 8)
