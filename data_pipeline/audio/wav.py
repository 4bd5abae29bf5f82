"""Read and write WAV files of one channel, with 16 bits or as float32: the sounds of a shard.

Shapes: T points of a sound.
"""

from __future__ import annotations

import io
from typing import Final

import numpy as np
from numpy.typing import NDArray

LEVELS: Final = 32_768  # of int16 from 0 to 1


def decode_wav(data: bytes | memoryview) -> NDArray[np.int16] | NDArray[np.float32]:
    """Return the points of a WAV in memory, (T,) int16 or float32, as `encode_wav` writes it.

    Raises `ValueError` if `data` is not a whole mono WAV with at least one int16 or float32 point.
    """
    from scipy.io import wavfile  # here, because training on pictures does not need it

    declared = int.from_bytes(data[4:8], "little") + 8
    if declared != len(data):
        raise ValueError(f"{len(data)} bytes are there, and a WAV would have {declared}; it is cut off, or no WAV")
    try:
        _, points = wavfile.read(io.BytesIO(data))
    except Exception as error:  # of several kinds for a damaged header
        raise ValueError(f"it is not a WAV that can be read ({error})") from None
    if points.ndim > 1 or not points.size or points.dtype not in (np.int16, np.float32):
        raise ValueError(f"the WAV holds points {points.shape} of {points.dtype}, not some of one channel in 16 bits")
    return np.array(points)  # which can be written to


def encode_wav(points: NDArray[np.int16] | NDArray[np.float32], *, sample_rate: int) -> bytes:
    """Return a mono WAV of (T,) int16 or float32 points; the same points give the same bytes."""
    from scipy.io import wavfile

    assert points.ndim == 1
    assert points.size
    assert points.dtype in (np.int16, np.float32)
    file = io.BytesIO()  # not through libsndfile, whose float WAVs carry the time of day
    wavfile.write(file, sample_rate, points)
    return file.getvalue()
