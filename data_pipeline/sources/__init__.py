"""Sources: where clean pictures and their base labels come from.

Comes in: a folder that the user names, or nothing where the pictures are drawn. Goes out: pictures of one size, (H, W,
3) uint8, each with a label, in an order that depends on the content alone. A source knows all its labels at once, so
that a build can choose and order pictures before it has decoded any. What may never happen: a picture that is skipped
because it does not decode, or an order that depends on the file system.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from data_pipeline.sample import Record


class Source(Protocol):
    """What `data_pipeline.build` needs of a source; it must also survive pickling, for worker processes."""

    @property
    def description(self) -> str:
        """What kind of source it is, for the manifest: no path, which would differ between machines."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, in the order of their labels."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """(num_pictures,): the label of each picture."""

    def __getitem__(self, number: int) -> Record:
        """One picture, the same at each call. Raises `UserError` that names the file where it does not decode."""
