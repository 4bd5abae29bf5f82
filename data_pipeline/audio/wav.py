"""Read and write WAV files of one channel, with 16 bits or as float32: the sounds of a shard.

Shapes: T points of a sound.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Mapping
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

LEVELS: Final = 32_768  # of int16 from 0 to 1
_DTYPES: Final[Mapping[tuple[int, int], np.dtype[Any]]] = {
    (1, 16): np.dtype("<i2"),
    (3, 32): np.dtype("<f4"),
}  # by WAV format tag and bits a point


def decode_wav(data: bytes | memoryview) -> NDArray[np.int16] | NDArray[np.float32]:
    """Return a copy of the points of a WAV in memory, (T,) int16 or float32, as `encode_wav` writes it.

    Parses only the header, which takes microseconds. Raises `ValueError` if `data` is not a whole mono WAV with at
    least one int16 or float32 point.
    """
    dtype: np.dtype[Any] | None = None
    for name, start, size in chunks(io.BytesIO(data)):
        chunk = memoryview(data)[start : start + size]
        if len(chunk) < size:
            raise ValueError(f"the WAV is cut off: {len(chunk)} of {size} bytes of its chunk {name!r} are there")
        if name == b"fmt ":
            if size < 16:
                raise ValueError("the WAV has no whole format chunk")
            tag, channels, _, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
            if channels != 1 or (tag, bits) not in _DTYPES:
                raise ValueError(f"the WAV has {channels} channels of format {tag} with {bits} bits a point")
            dtype = _DTYPES[tag, bits]
        elif name == b"data":
            if dtype is None:
                raise ValueError("the WAV has no format before its points")
            if size == 0 or size % dtype.itemsize:
                raise ValueError(f"the WAV holds {size} bytes of points, {dtype.itemsize} bytes each")
            return np.frombuffer(chunk, dtype).copy()
    raise ValueError("it is not a WAV with points")


def encode_wav(points: NDArray[np.int16] | NDArray[np.float32], *, sample_rate: int) -> bytes:
    """Return a mono WAV of (T,) int16 or float32 points; the same points give the same bytes."""
    from scipy.io import wavfile

    assert points.ndim == 1
    assert points.size
    assert points.dtype in (np.int16, np.float32)
    file = io.BytesIO()  # not through libsndfile, whose float WAVs carry the time of day
    wavfile.write(file, sample_rate, points)
    return file.getvalue()


def chunks(file: IO[bytes]) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name of each chunk of a WAV, its place, and the size that its header says.

    Yields nothing for other files. A chunk that is cut off is the last. `file` must be able to seek, and is left
    anywhere.
    """
    file.seek(0)
    start = file.read(12)
    if start[:4] != b"RIFF" or start[8:] != b"WAVE":
        return
    at = 20
    while len(header := file.read(8)) == 8:
        name, size = struct.unpack("<4sI", header)
        yield name, at, size
        at += size + size % 2 + 8
        file.seek(at - 8)
