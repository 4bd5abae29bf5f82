"""Decode stored samples: pictures or sounds, masks and labels, many at a time.

If a sample cannot be decoded, it is listed in `DecodedSamples.bad` with the reason, and the others are decoded.

Shapes: B samples, C channels, H height, W width, X points of all sounds end to end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.audio.wav import decode_wav
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import printable
from data_pipeline.core.random_crop import Crop, CropLaw, random_resized_crops
from data_pipeline.core.sample import MASK_OUTSIDE, NO_LABEL, BadSample
from data_pipeline.loading.picture_decode import decode_crops, decode_square, picture_size
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.png import decode_pngs
from data_pipeline.storage.store import SampleStore

Crops = Callable[[Tensor], list[list[Crop]]]  # from the sizes of pictures, see `draw_crops`


@dataclass(frozen=True)
class DecodedSamples:
    """Decoded samples in memory: a part of a dataset, or all of it.

    Attributes:
        index_B: (B,) int64 dataset indices.
        labels: each label of the dataset by name, (B,) int64; `NO_LABEL` for a sample without it.
        pictures_BCHW: uint8; None for sounds.
        pictures_b_BCHW: uint8, the crops of the second view; None if pictures are whole.
        masks_BHW: uint8; None for sounds, and if no overlay is drawn into the shards.
        points_X: int16 or float32, the sounds end to end; None for pictures. May hold sounds of other samples too.
        start_B, length_B: (B,) int64, the first point of each sound in `points_X` and its length; None for pictures.
        longest: an upper bound on the length of a sound, in points.
        bad: by row, the samples that could not be read. Such a row is black or one point of silence, without labels.
        read_seconds: the time to read the stored bytes, before decoding.
    """

    index_B: Tensor
    labels: Mapping[str, Tensor]
    pictures_BCHW: Tensor | None = None
    pictures_b_BCHW: Tensor | None = None
    masks_BHW: Tensor | None = None
    points_X: Tensor | None = None
    start_B: Tensor | None = None
    length_B: Tensor | None = None
    longest: int = 0
    bad: Mapping[int, BadSample] = field(default_factory=dict)
    read_seconds: float = 0.0

    def __len__(self) -> int:
        return self.index_B.numel()

    def take(self, row_B: Tensor) -> DecodedSamples:
        """Return the rows `row_B`, (B,) int64 on the same device, in that order. The rows must not be bad."""
        taken = self._map(lambda name, tensor: tensor if name == "points_X" else tensor.index_select(0, row_B))
        return replace(taken, bad={})

    def without_bad(self) -> DecodedSamples:
        """Return the good rows."""
        if not self.bad:
            return self
        good = [row for row in range(len(self)) if row not in self.bad]
        return self.take(torch.tensor(good, dtype=torch.int64, device=self.index_B.device))

    def to(self, device: torch.device) -> DecodedSamples:
        """Return the same samples on another device."""
        return self._map(lambda _, tensor: tensor.to(device))

    def sound(self, row: int) -> Tensor:
        """Return the waveform of one row, (T,), without a copy."""
        assert self.points_X is not None
        assert self.start_B is not None
        assert self.length_B is not None
        start = int(self.start_B[row])
        return self.points_X[start : start + int(self.length_B[row])]

    def _map(self, function: Callable[[str, Tensor], Tensor]) -> DecodedSamples:
        mapped: dict[str, Any] = {
            name: function(name, value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        labels = {name: function(name, label_B) for name, label_B in self.labels.items()}
        return replace(self, labels=labels, **mapped)


def sound_dtype(manifest: Manifest) -> torch.dtype:
    """Return the dtype of the stored points: float32 for sounds with a baked overlay, else int16 as recorded."""
    return torch.float32 if manifest.overlay is not None and not manifest.is_online else torch.int16


def draw_crops(law: CropLaw, keys: Sequence[DrawKeys], sizes_B2: Tensor) -> list[list[Crop]]:
    """Return the crop of each picture for each view, which has keys; `sizes_B2` holds heights and widths."""
    drawn = [random_resized_crops(sizes_B2, of_view, law) for of_view in keys]
    return [[Crop(*box) for box in boxes_B4.tolist()] for boxes_B4 in drawn]


def decode(store: SampleStore, indices: NDArray[np.int64], *, crops: Crops | None = None) -> DecodedSamples:
    """Read and decode the samples at `indices`, (B,) int64, in that order.

    With `crops`, for tars, pictures are decoded to two crops and not whole.

    Raises `IndexError` if there is no such sample.
    """
    began = time.perf_counter()
    stored = store.read(indices)
    read_seconds = time.perf_counter() - began
    manifest, files = store.manifest, stored.files
    errors: dict[int, str] = {}
    found = stored.labels
    labels = {
        name: torch.from_numpy(found[name]) if name in found else torch.full((len(indices),), NO_LABEL)
        for name in manifest.labels
    }
    pictures_BCHW = pictures_b_BCHW = masks_BHW = None
    clips: list[Tensor] = []
    if manifest.medium == "sound":
        clips, wav_errors = _decode_clips(files["content"], sound_dtype(manifest))
        errors |= wav_errors
    elif manifest.any_size:
        views_VBCHW, picture_errors = _decode_pictures(files["content"], crops, manifest)
        pictures_BCHW, pictures_b_BCHW = views_VBCHW[0], None if crops is None else views_VBCHW[1]
        errors |= picture_errors
    else:
        num_channels, height, width = manifest.input_shape
        pictures_BCHW, stored_errors = decode_pngs(files["content"], (num_channels, height, width))
        errors |= stored_errors
        if "mask" in files:
            masks_B1HW, mask_errors = decode_pngs(files["mask"], (1, height, width))
            masks_BHW = masks_B1HW[:, 0]
            errors |= mask_errors
    bad: dict[int, BadSample] = {}
    for row, reason in sorted({**errors, **stored.unreadable}.items()):
        index = int(indices[row])
        file = "" if row in stored.unreadable else f"{printable(store.file_of(index))}: "
        bad[row] = store.bad_sample(index, f"{file}{reason}")
        for label_B in labels.values():
            label_B[row] = NO_LABEL
        for pictures in (pictures_BCHW, pictures_b_BCHW):
            if pictures is not None:
                pictures[row] = 0
        if masks_BHW is not None:
            masks_BHW[row] = MASK_OUTSIDE
    decoded = DecodedSamples(
        index_B=torch.from_numpy(indices.astype(np.int64)),
        labels=labels,
        pictures_BCHW=pictures_BCHW,
        pictures_b_BCHW=pictures_b_BCHW,
        masks_BHW=masks_BHW,
        bad=bad,
        read_seconds=read_seconds,
    )
    if manifest.medium == "picture":
        return decoded
    length_B = torch.tensor([len(clip) for clip in clips], dtype=torch.int64)
    return replace(
        decoded,
        points_X=torch.cat([torch.empty(0, dtype=sound_dtype(manifest)), *clips]),
        start_B=length_B.cumsum(0) - length_B,
        length_B=length_B,
        longest=max(map(len, clips), default=0),
    )


def _decode_pictures(
    files: Sequence[memoryview], crops: Crops | None, manifest: Manifest
) -> tuple[Tensor, dict[int, str]]:
    """Decode picture files of any size to (V, B, *input_shape) uint8, and return by row why one does not decode.

    There are two views, each of which is a crop, or one, the square in the middle if there are no `crops`.
    """
    num_channels, size, _ = manifest.input_shape
    errors: dict[int, str] = {}
    boxes: list[list[Crop]] = []
    if crops is not None:
        sizes_B2 = torch.ones(len(files), 2, dtype=torch.int64)
        for row, file in enumerate(files):
            try:
                sizes_B2[row] = torch.tensor(picture_size(file))
            except ValueError as error:
                errors[row] = str(error)
        boxes = crops(sizes_B2)
    views_VBCHW = torch.zeros(len(boxes) or 1, len(files), num_channels, size, size, dtype=torch.uint8)
    for row, file in enumerate(files):
        if row in errors:
            continue
        try:
            if of_row := [box[row] for box in boxes]:
                views_VBCHW[:, row] = decode_crops(file, of_row, size=size)
            else:
                views_VBCHW[:, row] = decode_square(file, size=size)
        except ValueError as error:
            errors[row] = str(error)
    return views_VBCHW, errors


def decode_ahead(
    store: SampleStore, chunks: Iterable[NDArray[np.int64]], *, num_threads: int
) -> Iterator[DecodedSamples]:
    """Yield the decoded samples of each chunk, in order, while threads decode the next `num_threads` chunks."""
    with ThreadPoolExecutor(num_threads) as pool:
        waiting: deque[Future[DecodedSamples]] = deque()
        for chunk in chunks:
            waiting.append(pool.submit(decode, store, chunk))
            if len(waiting) > num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _decode_clips(files: Sequence[memoryview], dtype: torch.dtype) -> tuple[list[Tensor], dict[int, str]]:
    """Decode WAV files, and return by row the reason why a file does not decode; it becomes one point of silence."""
    clips = [torch.zeros(1, dtype=dtype) for _ in files]
    errors: dict[int, str] = {}
    for row, file in enumerate(files):
        try:
            # torch needs numbers at multiples of their own size, and the header of a WAV may have any length.
            clip = torch.from_numpy(np.require(decode_wav(file), requirements="A"))
            if clip.dtype != dtype:
                raise ValueError(f"it holds {clip.dtype}, not {dtype}")
            clips[row] = clip
        except ValueError as error:
            errors[row] = str(error)
    return clips, errors
