"""Background sounds behind speech (Tamkin et al. 2022): babble, traffic or machinery, quiet and without a pause.

Each class is one recording. The recording is scaled so that its largest magnitude is `volume`, cut to the length of the
speech, and added to it. The speech keeps its loudness.

Shapes: B batch, T points of an input, K classes, X points of all recordings one after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final, Literal, Self

import torch
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys, integers
from data_pipeline.core.schema import Schema, Share
from data_pipeline.overlays import FIRST_PURPOSE, NOTHING_GIVEN, Overlaid, Overlay

Crop = Literal["first_or_last", "random_offset", "first"]

_CLASS, _CROP = FIRST_PURPOSE + 1, FIRST_PURPOSE + 2  # FIRST_PURPOSE crops the speech (data_pipeline.audio.waveform)
_OFFSET_STEPS: Final = 1 << 30  # values of a random offset: far more than points, and the product fits 64 bits


class NoiseOptions(Schema):
    """The options of the overlay noise.

    noise_root: the folder of the background sounds; by default that of the source. The source `procedural` generates
        its own.
    noise_volume: the largest magnitude of each whole background sound, where 1 is full scale, as published.
    noise_crop: the part of a background sound that is heard in training; the test split hears the first points.
    """

    noise_root: Path | None = None
    noise_volume: Share = 0.05
    noise_crop: Literal["first_or_last", "random_offset"] = "first_or_last"


class Noise(Overlay):
    """An overlay of background sounds in three equally likely classes.

    Args:
        sounds_X: (X,) float32, the recordings one after another, each with the largest magnitude 1.
        length_K: (3,) int64, the number of points of each recording; their sum is X.
        num_points: T, at most the length of the shortest recording.
        volume: the largest magnitude of a scaled recording, from 0, which is silence, to 1; published: 0.05.
        crop: the T points of the recording that are heard. `first_or_last` takes one of the two with equal chance, as
            published for training. `first` takes the first, as published for the test. `random_offset` begins at any
            point, uniformly.

    """

    class_names = ("babble", "traffic", "machinery")
    title = "background"
    options_schema: ClassVar[type[Schema]] = NoiseOptions
    sounds_X: Tensor
    length_K: Tensor
    _start_K: Tensor
    _scaled_X: Tensor

    def __init__(self, *, sounds_X: Tensor, length_K: Tensor, num_points: int, volume: float, crop: Crop) -> None:
        super().__init__()
        self.num_points, self.volume, self.crop = num_points, volume, crop
        self.register_buffer("sounds_X", sounds_X)
        self.register_buffer("length_K", length_K)
        self.register_buffer("_start_K", length_K.cumsum(0) - length_K, persistent=False)
        self.register_buffer("_scaled_X", sounds_X * volume, persistent=False)

    @classmethod
    def of(cls, sounds: Sequence[Tensor], *, num_points: int, volume: float, crop: Crop) -> Self:
        """Return the overlay of one recording for each class.

        A recording is as `data_pipeline.sources.background` returns it: (any length,) float32 of `num_points` or more,
        at the rate of the speech, in any scale. Only the points that `crop` can choose are kept.
        """
        kept = []
        for sound in sounds:
            scaled = sound / sound.abs().max()
            match crop:
                case "first_or_last":
                    kept.append(torch.cat([scaled[:num_points], scaled[-num_points:]]))
                case "first":
                    kept.append(scaled[:num_points])
                case "random_offset":
                    kept.append(scaled)
        length_K = torch.tensor([len(sound) for sound in kept])
        return cls(sounds_X=torch.cat(kept), length_K=length_K, num_points=num_points, volume=volume, crop=crop)

    def options(self) -> dict[str, str | int | float]:
        return {"num_points": self.num_points, "volume": self.volume, "crop": self.crop}

    def forward(self, inputs: Tensor, keys: DrawKeys, labels: Mapping[str, Tensor] = NOTHING_GIVEN) -> Overlaid:
        """Add one background sound to each waveform, (B, T) float32 of `num_points`; the sum is not clipped."""
        assert inputs.shape == (len(keys.index_B), self.num_points), (inputs.shape, self.num_points)
        label_B = integers(keys, 1, len(self.class_names), purpose=_CLASS)[:, 0]
        start_B = self._start_K[label_B] + self._offsets(keys, self.length_K[label_B] - self.num_points)
        # Copies rows of an overlapping view: an index for every point would cost 8 bytes a point.
        behind_BT = self._scaled_X.unfold(0, self.num_points, 1)[start_B]
        return Overlaid(behind_BT.add_(inputs), label_B, None)

    def _offsets(self, keys: DrawKeys, last_B: Tensor) -> Tensor:
        """Draw the first point of each crop, from 0 to `last_B` inclusive: (B,) int64."""
        match self.crop:
            case "first":
                return torch.zeros_like(last_B)
            case "first_or_last":
                return last_B * integers(keys, 1, 2, purpose=_CROP)[:, 0]
            case "random_offset":
                step_B = integers(keys, 1, _OFFSET_STEPS, purpose=_CROP)[:, 0]
                return step_B * (last_B + 1) // _OFFSET_STEPS
