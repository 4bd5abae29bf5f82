"""Generated pictures of ten kinds of pattern: stripes, waves, checkers, grids, bricks, rings and four more.

Only the form shows the kind. Everything else is drawn from the same distributions for all kinds: colours, contrast, the
brighter of the two tones, scale, rotation, place, light, noise, and the patches that hide part of the picture. So no
linear function of the pixels tells the kinds apart, and crops, flips, colour jitter and the loss of colour leave the
kind as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from data_pipeline.core.randomness import generator
from data_pipeline.core.sample import BASE, Record
from data_pipeline.sources import LabelColumn, SourceInputs

Coordinate = NDArray[np.float64]  # (H, W): x or y of every point of a picture
Region = NDArray[np.bool_]  # (H, W): the points that a form covers
Pattern = Callable[[Coordinate, Coordinate, float, Generator], Region]  # of x, y, the period in pixels

IMAGE_SIZE: Final = 32
DEFAULT_NUM_RECORDS: Final[Mapping[str, int]] = {"train": 10_000, "test": 2_000}
_OVERSAMPLING = 2  # points per pixel along each axis, averaged: without it the look of thin lines varies with the angle
_POINTS = (np.arange(IMAGE_SIZE * _OVERSAMPLING) + 0.5) / _OVERSAMPLING
_COLUMN, _ROW = np.meshgrid(_POINTS, _POINTS)
_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float64)  # ITU-R BT.601, as in Pillow's conversion to grey


def phase(distance: Coordinate) -> Coordinate:
    """Return the fractional part, in [0, 1): the position within a period."""
    return distance - np.floor(distance)


def _waves(x: Coordinate, y: Coordinate, period: float, rng: Generator) -> Region:
    length = period * rng.uniform(1.6, 2.4)
    bent = x + period * rng.uniform(0.5, 0.8) * np.sin(2 * math.pi / length * y)
    return phase(bent / period) < rng.uniform(0.35, 0.65)


def _checker(x: Coordinate, y: Coordinate, period: float, rng: Generator) -> Region:
    side = period * 0.75
    squares = np.floor(x / side) + np.floor(y / side)
    white: Region = squares % 2 == 0
    return white


def _grid(x: Coordinate, y: Coordinate, period: float, rng: Generator) -> Region:
    side, line = period * 1.1, rng.uniform(0.2, 0.3)
    return np.minimum(phase(x / side), phase(y / side)) < line


def _bricks(x: Coordinate, y: Coordinate, period: float, rng: Generator) -> Region:
    height, line = period * 0.8, rng.uniform(1.0, 1.6)
    row = np.floor(y / height)
    along = phase(x / (2 * height) + 0.5 * (row % 2)) * 2 * height
    return np.minimum(along, phase(y / height) * height) < line


def _spokes(x: Coordinate, y: Coordinate, period: float, rng: Generator) -> Region:
    num_spokes = int(rng.integers(6, 12))
    return phase(np.arctan2(y, x) * num_spokes / (2 * math.pi)) < rng.uniform(0.4, 0.6)


def _dots(x: Coordinate, y: Coordinate, period: float, rng: Generator) -> Region:
    u, v = _scatter(x, y, period * 1.1, rng)
    return np.hypot(u, v) < period * rng.uniform(0.28, 0.4)


def _crosses(x: Coordinate, y: Coordinate, period: float, rng: Generator) -> Region:
    u, v = (np.abs(axis) for axis in _scatter(x, y, period * 1.3, rng))
    arm = period * 0.55
    return (np.maximum(u, v) < arm) & (np.minimum(u, v) < arm * rng.uniform(0.28, 0.38))


def _blobs(x: Coordinate, y: Coordinate, period: float, rng: Generator) -> Region:
    total = np.zeros_like(x)
    for angle, phase, stretch in rng.uniform((0, 0, 0.8), (math.pi, 2 * math.pi, 1.25), (8, 3)):
        frequency = 2 * math.pi / (1.3 * period * stretch)
        total += np.cos(frequency * (math.cos(angle) * x + math.sin(angle) * y) + phase)
    return total > rng.uniform(-0.6, 0.6)


def _scatter(x: Coordinate, y: Coordinate, side: float, rng: Generator) -> tuple[Coordinate, Coordinate]:
    """Return each point relative to the centre of the object in its cell, in axes rotated by the angle of the cell."""
    num_cells = 16  # a picture holds fewer in any direction
    turn, shift_x, shift_y = rng.uniform(-1, 1, (3, num_cells, num_cells))
    column, row = np.floor(x / side), np.floor(y / side)
    cell = row.astype(np.intp) % num_cells, column.astype(np.intp) % num_cells
    u = x - side * (column + 0.5 + 0.1 * shift_x[cell])
    v = y - side * (row + 0.5 + 0.1 * shift_y[cell])
    cos, sin = np.cos(math.pi * turn[cell]), np.sin(math.pi * turn[cell])
    return cos * u + sin * v, cos * v - sin * u


PATTERNS: Final[Mapping[str, Pattern]] = {
    "stripes": lambda x, y, period, rng: phase(x / period) < rng.uniform(0.35, 0.65),
    "waves": _waves,
    "checker": _checker,
    "grid": _grid,
    "bricks": _bricks,
    "rings": lambda x, y, period, rng: phase(np.hypot(x, y) / period) < rng.uniform(0.35, 0.65),
    "spokes": _spokes,
    "dots": _dots,
    "crosses": _crosses,
    "blobs": _blobs,
}


def draw(pattern: Pattern, rng: Generator) -> NDArray[np.uint8]:
    """Draw one picture of a pattern: (32, 32, 3) uint8."""
    angle, (centre_x, centre_y) = rng.uniform(0, 2 * math.pi), rng.uniform(8, 24, 2)
    x, y = turned(_COLUMN - centre_x, _ROW - centre_y, angle)
    covered = per_pixel(pattern(x, y, math.exp(rng.uniform(math.log(4.5), math.log(8.0))), rng), _OVERSAMPLING)
    tone_a, tone_b = _two_tones(rng)
    picture = tone_a + (tone_b - tone_a) * covered
    light = x[::_OVERSAMPLING, ::_OVERSAMPLING, None] / IMAGE_SIZE  # from one side
    picture *= 1 + rng.uniform(0, 0.3) * light
    for _ in range(rng.integers(0, 3)):
        picture += (rng.uniform(0, 1, 3) - picture) * per_pixel(_patch(rng), _OVERSAMPLING)
    picture += rng.uniform(0.0, 0.06) * rng.standard_normal(picture.shape)
    image: NDArray[np.uint8] = np.rint(255 * picture.clip(0, 1)).astype(np.uint8)
    return image


def turned(x: Coordinate, y: Coordinate, angle: float) -> tuple[Coordinate, Coordinate]:
    """Return the coordinates of points in axes that are turned by an angle."""
    cos, sin = math.cos(angle), math.sin(angle)
    return cos * x + sin * y, cos * y - sin * x


def per_pixel(region: Region, num_points: int) -> NDArray[np.float64]:
    """Return the share of each pixel that a region covers, (H, W, 1), if it has `num_points` points along each axis."""
    height, width = (length // num_points for length in region.shape)
    covered: NDArray[np.float64] = region.reshape(height, num_points, width, num_points, 1).mean(axis=(1, 3))
    return covered


def _two_tones(rng: Generator) -> NDArray[np.float64]:
    """Draw two colours of different brightness, (2, 3); a picture without colour still shows its pattern."""
    gap = rng.uniform(0.2, 0.6)
    middle = rng.uniform(gap / 2, 1 - gap / 2)
    luma = middle + gap / 2 * np.array([-1, 1]) * rng.choice([-1, 1])
    # Weak colours: vivid colours survive most views and tell pictures apart, so an encoder would learn nothing else.
    colours = rng.uniform(-0.14, 0.14, (2, 3))
    colours += (luma - colours @ _LUMA)[:, None]
    return colours.clip(0, 1)


def _patch(rng: Generator) -> Region:
    """Return the region of a box or a disc, 3 to 9 pixels wide, that hides the pattern."""
    (centre_x, centre_y), (half_x, half_y) = rng.uniform(0, IMAGE_SIZE, 2), rng.uniform(1.5, 4.5, 2)
    u, v = np.abs(_COLUMN - centre_x) / half_x, np.abs(_ROW - centre_y) / half_y
    inside: Region = (np.maximum(u, v) if rng.random() < 0.5 else np.hypot(u, v)) < 1
    return inside


@dataclass(frozen=True)
class Procedural:
    """A source of `num_records` pictures, the ten kinds in turn.

    Picture `number` depends on (seed, split, number) alone. A subclass generates something else of several kinds.
    """

    seed: int
    split: str
    num_records: int
    description: ClassVar[str] = "procedural"
    title: ClassVar[str] = "picture"
    kinds: ClassVar[Mapping[str, Any]] = PATTERNS
    num_records_of: ClassVar[Mapping[str, int]] = DEFAULT_NUM_RECORDS  # by split
    draw: ClassVar[Callable[[Any, Generator], NDArray[Any]]] = draw  # of a kind

    @classmethod
    def open(cls, given: SourceInputs) -> Self:
        return cls(given.seed, given.split, given.limit or cls.num_records_of[given.split])

    @property
    def labels(self) -> Mapping[str, LabelColumn]:
        return {BASE: LabelColumn(self.title, tuple(self.kinds), np.arange(self.num_records) % len(self.kinds))}

    def __getitem__(self, number: int) -> Record:
        kind = tuple(self.kinds.values())[number % len(self.kinds)]
        rng = generator(self.seed, f"{self.description} {self.split}", number)
        return Record(type(self).draw(kind, rng))
