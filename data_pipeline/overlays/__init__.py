"""Overlays: a second, labelled object drawn on a picture.

Comes in: a clean picture (32, 32, 3) uint8 and a random generator that belongs to this sample alone. Goes out: the
picture with the object on it, the object's class, and a mask of where it is. An overlay is pure: the same picture and
generator state give the same result, the class is drawn first and without a look at the picture, so that the two labels
of a sample are independent. What may never happen: a draw from ambient state, or a change to the picture that came in.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from data_pipeline.sample import Overlaid

IMAGE_SIZE: Final = 32  # the side of the pictures that the published geometry is made for


class Overlay(Protocol):
    """What `data_pipeline.build` needs of an overlay; it must also survive pickling, for worker processes."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, in the order of their labels."""

    def __call__(self, image: NDArray[np.uint8], rng: Generator) -> Overlaid:
        """Draw one object on a copy of `image`, (32, 32, 3) uint8, with draws from `rng` alone."""
