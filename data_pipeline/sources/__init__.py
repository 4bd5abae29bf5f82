"""Sources: where clean pictures and sounds, and their base labels, come from.

Comes in: a folder that the user names, or nothing where the records are made. Goes out: records, pictures of one size
or sounds of one rate, each with a label, in an order that depends on the content alone. A source knows all its labels
at once, so that a build can choose and order records before it has decoded any. What may never happen: a record that is
skipped because it does not decode, or an order that depends on the file system.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.sample import Record


class Source(Protocol):
    """What `data_pipeline.building.build` needs of a source; it must also survive pickling, for worker processes."""

    @property
    def description(self) -> str:
        """What kind of source it is, for the manifest: no path, which would differ between machines."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, in the order of their labels; none where records have no class."""

    @property
    def title(self) -> str:
        """Names the label for readers, such as "picture" or "spoken digit"."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """(num_records,): the label of each record, `NO_LABEL` where it has none."""

    def __getitem__(self, number: int) -> Record:
        """One record, the same at each call. Raises `UserError` that names the file where it does not decode."""


class SoundSource(Source, Protocol):
    """A source of sounds."""

    @property
    def sample_rate(self) -> int:
        """Points a second, of every record."""
