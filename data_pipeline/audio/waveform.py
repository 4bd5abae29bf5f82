"""Crop or pad waveforms to one length for a batch.

Shapes: B batch, T points of every waveform of a batch, X points of all clips end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from data_pipeline.audio.wav import LEVELS
from data_pipeline.core.counter_rng import DrawKeys, integers

CROP_PURPOSE: Final = 100  # `purpose` in `data_pipeline.core.counter_rng`


def to_float(waveforms: Tensor) -> Tensor:
    """Convert int16 points of any shape to float32 in [-1, 1) by a division by 32,768, which is exact."""
    return waveforms.to(torch.float32) / LEVELS


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
