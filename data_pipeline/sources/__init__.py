"""Sources of clean pictures and sounds with their base labels.

A source reads a folder that the user names, or makes its records. Its records are pictures of one size or sounds of one
rate, each with a label. A source knows all its labels at once, so that a build can choose and order records before it
decodes any.

Guarantees: no record is skipped because it does not decode, and the order depends on the content alone, not on the file
system.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.sample import Record


class Source(Protocol):
    """A source as `data_pipeline.building.build` needs it. It must be picklable, for worker processes."""

    @property
    def description(self) -> str:
        """Return the kind of source for the manifest, without a path, which would differ between machines."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the class names in label order; none if records have no class."""

    @property
    def title(self) -> str:
        """Return a title of the label for readers, such as "picture" or "spoken digit"."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """Return the label of each record, (num_records,); `NO_LABEL` if it has none."""

    def __getitem__(self, number: int) -> Record:
        """Return one record, the same at each call. Raises `UserError` that names the file if it does not decode."""


class SoundSource(Source, Protocol):
    """A source of sounds."""

    @property
    def sample_rate(self) -> int:
        """Return the points a second of every record."""
