"""Read and write WAV, and crop or pad waveforms to one length for a batch.

Shapes: B batch, T points of every waveform of a batch, X points of one sound or of all clips end to end.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys, integers

CROP_PURPOSE: Final = 100  # `purpose` in `data_pipeline.core.counter_rng`
LEVELS: Final = 32_768  # of int16 from 0 to 1
UNKNOWN_SIZE: Final = 0x7FFF_0000  # a size at or above this is from a program that could not seek back to write it
_DTYPES: Final[Mapping[tuple[int, int], np.dtype[Any]]] = MappingProxyType(
    {(1, 16): np.dtype("<i2"), (3, 32): np.dtype("<f4")}  # by WAV format tag and bits a point
)


def decode_wav(data: bytes | memoryview) -> NDArray[np.int16] | NDArray[np.float32]:
    """Return a copy of the points of a WAV in memory, (T,) int16 or float32, as `encode_wav` writes it.

    Parses only the header, which takes microseconds. Raises `ValueError` if `data` is not a whole mono WAV with at
    least one int16 or float32 point.
    """
    dtype: np.dtype[Any] | None = None
    for name, size, chunk in _chunks(data):
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
            points: NDArray[np.int16] | NDArray[np.float32] = np.frombuffer(chunk, dtype).copy()
            return points
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


def _chunks(data: bytes | memoryview) -> Iterator[tuple[bytes, int, memoryview]]:
    """Yield (name, size in its header, bytes that are there) of each chunk of a RIFF file; nothing for other files."""
    view = memoryview(data)
    if bytes(view[:4]) != b"RIFF" or bytes(view[8:12]) != b"WAVE":
        return
    at = 12
    while at + 8 <= len(view):
        name, size = struct.unpack_from("<4sI", view, at)
        yield name, size, view[at + 8 : at + 8 + size]
        at += 8 + size + size % 2


def to_float(waveforms: Tensor) -> Tensor:
    """Convert int16 points of any shape to float32 in [-1, 1) by a division by 32,768, which is exact."""
    return waveforms.to(torch.float32) / LEVELS


def resample(sound: Tensor, *, from_rate: int, to_rate: int) -> Tensor:
    """Return a float sound (..., X) at another rate, in points a second, with as many points as librosa 0.9 returns.

    The filter is a windowed sinc with the Kaiser window that resampy calls `kaiser_best`, the published choice. With
    Y = X * (to_rate / from_rate) in floating point, it makes floor(Y) points; a zero follows unless Y is whole. The
    rounding of Y matters: 30 s at 44,100 points a second become 1,440,001 points at 48,000, and the last is a zero.
    """
    from torchaudio import functional as audio  # here, because no run on pictures needs it

    num_points = sound.shape[-1] * (to_rate / from_rate)
    num_made = math.floor(num_points)
    resampled: Tensor = audio.resample(
        sound,
        from_rate,
        to_rate,
        lowpass_filter_width=64,
        rolloff=0.9475937167399596,
        resampling_method="sinc_interp_kaiser",
        beta=14.769656459379492,
    )
    return F.pad(resampled[..., :num_made], (0, math.ceil(num_points) - num_made))


def crop_last(keys: DrawKeys) -> Tensor:
    """Draw with equal chance whether a sound that is too long keeps its last points (True) or its first: (B,) bool."""
    return integers(keys, 1, 2, purpose=CROP_PURPOSE)[:, 0].bool()


def fit_length(clips: Sequence[Tensor], num_points: int, *, last_B: Tensor) -> Tensor:
    """Crop or pad clips (any length,) of one dtype in host memory to one batch (B, T = num_points) of that dtype.

    A shorter clip is followed by zeros. A longer clip keeps its last T points if its entry of `last_B` (B,) bool is
    True, else its first T points.
    """
    assert len(clips) == len(last_B)
    waveforms_BT = torch.empty((len(clips), num_points), dtype=clips[0].dtype)
    # NumPy views of the same memory: there are six slices for each clip, and NumPy needs a fifth of torch's time.
    for waveform_T, clip, last in zip(waveforms_BT.numpy(), clips, last_B.tolist(), strict=True):
        kept = clip.numpy()[-num_points:] if last else clip.numpy()[:num_points]
        waveform_T[: len(kept)] = kept
        waveform_T[len(kept) :] = 0
    return waveforms_BT


def gather_clips(flat_X: Tensor, start_B: Tensor, length_B: Tensor, num_points: int, *, last_B: Tensor) -> Tensor:
    """Do `fit_length` on clips that lie end to end in one tensor on any device: (B, T = num_points), as `flat_X`.

    `start_B` and `length_B` (B,) int64 and `last_B` (B,) bool are on the same device. Copies nothing to the host.
    """
    if flat_X.device.type == "cpu":  # slices are several times faster there than an index for every point
        ranges = zip(start_B.tolist(), length_B.tolist(), strict=True)
        return fit_length([flat_X[start : start + length] for start, length in ranges], num_points, last_B=last_B)
    first_B = start_B + (length_B - num_points).clamp(min=0) * last_B
    point_T = torch.arange(num_points, device=flat_X.device)
    waveforms_BT = flat_X[(first_B[:, None] + point_T).clamp_(max=flat_X.numel() - 1)]
    return waveforms_BT.masked_fill_(point_T >= length_B[:, None], 0)
