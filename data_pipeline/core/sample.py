"""The containers of samples: records of a source, stored samples, and what a sample of a batch may lack.

A sample is a picture or a sound with any number of named labels. `base` says what the picture shows or which digit is
spoken. `overlay` says what was drawn on the picture or is heard behind the digit. Sources and overlays may give others.
The labels of an overlay that is drawn at each reading are `NO_LABEL` until it is drawn.

Shapes: C channels, H height, W width, T points of a waveform.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Medium = Literal["picture", "sound"]
Layout = Literal["scaled", "tiled"]  # of an overlay, on pictures of more than 32 pixels; see `PictureOverlay`

NO_LABEL = -1  # the class of a sample without this label
FILE_ENTRY = "__file__"  # of the JSON of a sample, beside its labels, none of which has such a name: see `Record`
BASE, OVERLAY = "base", "overlay"  # the labels that most datasets have; see `Manifest.labels` for all

MASK_OUTSIDE = 0  #   outside the object's box
MASK_BOX = 128  #     inside the smallest box around the object, but not drawn on
MASK_OBJECT = 255  #  drawn on by the overlay


def sample_key(index: int) -> str:
    """Return the key of a sample: the name of its members in a shard, without their endings."""
    return f"{index:08d}"


@dataclass(frozen=True)
class Record:
    """One clean picture or sound of a source.

    `content` is a picture, (H, W, C) uint8, or a sound of any length, (T,) int16. `file` is the path of its file below
    the folder of the source; empty if it has no file of its own. `remarks` say what is odd about it, or what was
    changed when it was decoded, each as words that go on "it ...".
    """

    content: NDArray[np.uint8] | NDArray[np.int16]
    file: str = ""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One stored sample. `data_pipeline.storage.write` names its members in a shard.

    `index` counts the samples of the dataset from 0, and is part of the key of every random draw for this sample. With
    `--repeats R`, samples `i` and `i + num_records` show the same record of the source.

    `content` is a picture, (H, W, C) uint8, or a sound, (T,): int16 as recorded, or float32 if an overlay was mixed in.
    `mask` is (H, W) uint8 in the levels above, or None without an overlay in the shard; then there is no `.mask.png`.
    `labels` maps names of labels to numbers of classes. A label that is not named is stored as `NO_LABEL`.
    """

    index: int
    content: NDArray[np.uint8] | NDArray[np.int16] | NDArray[np.float32]
    mask: NDArray[np.uint8] | None
    labels: Mapping[str, int]

    @property
    def key(self) -> str:
        return sample_key(self.index)


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be read, with the reason; `shard` is the file name.

    In a mixture, `index` counts the samples of all sources, `first` is the index of the first sample of its source, and
    `shard` begins with the name of the source.
    """

    index: int
    shard: str
    reason: str
    first: int = 0

    @property
    def key(self) -> str:
        return sample_key(self.index - self.first)
