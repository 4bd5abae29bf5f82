"""Trifeature (Hermann and Lampinen 2020): one of ten shapes, in one of ten textures and one of ten colours, on grey.

Each picture has three labels: `base` is the shape, and `texture` and `colour` are the others. The sizes are those of
the published pictures in proportion: a shape of 128 pixels in a picture of 224, turned by up to 45 degrees, at a random
place, and filled with a texture that is turned by another angle. The points between the marks of a texture show the
background. A texture repeats every 10 pixels of 224, and on small pictures every 6 pixels, so that it can be seen.

The law of the labels: shapes come in turn. Every 1,000 pictures hold each of the 1,000 combinations once, in an order
drawn by the seed. Then each correlated label takes the number of the shape with the probability `correlation`,
independently of the other, and keeps its number otherwise. So it agrees with the shape in a share of
correlation + (1 - correlation) / 10 of all pictures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Final, Literal, Self

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import Field

from data_pipeline.core.randomness import generator
from data_pipeline.core.sample import BASE, Record
from data_pipeline.core.schema import ImageSize, Schema, Share
from data_pipeline.sources import LabelColumn, SourceInputs
from data_pipeline.sources.procedural import DEFAULT_NUM_RECORDS, Coordinate, Region, per_pixel, phase, turned

Shape = Callable[[Coordinate, Coordinate], Region]  # of x to the right and y downwards, from -1 to 1 in its square
Texture = Callable[[Coordinate, Coordinate, Generator], Region]  # of x and y in periods

DEFAULT_IMAGE_SIZE: Final = 64
SMALLEST_IMAGE_SIZE: Final = 48  # pixels: on smaller pictures the textures cannot be told apart
_PUBLISHED_SIZE = 224  # pixels, like the two below
_SHAPE_SIZE = 128
_PERIOD, _LEAST_PERIOD = 10, 6
_MAX_TURN = math.pi / 4
_OVERSAMPLING = 3  # points per pixel along each axis, averaged
_NUM_CELLS = 64  # along each axis, after which a random texture repeats: more than a picture holds
_BACKGROUND = 0.5
_NUM_CLASSES = 10
_NUM_COMBINATIONS = _NUM_CLASSES**3


def _inside(corners: str) -> Shape:
    """Return the shape of a polygon, whose corners are written as "x y, x y, ..."."""
    points = [(float(x), float(y)) for x, y in (corner.split() for corner in corners.split(","))]

    def shape(x: Coordinate, y: Coordinate) -> Region:
        inside = np.zeros(x.shape, dtype=np.bool_)
        for (x0, y0), (x1, y1) in zip(points, points[1:] + points[:1], strict=True):
            if y0 != y1:  # a ray to the right crosses the edge
                inside ^= ((y0 <= y) != (y1 <= y)) & (x < x0 + (y - y0) * ((x1 - x0) / (y1 - y0)))
        return inside

    return shape


def _star(num_points: int = 5, inner: float = 0.42) -> Shape:
    radii = [1.05 if corner % 2 == 0 else inner for corner in range(2 * num_points)]
    angles = [math.pi * corner / num_points for corner in range(2 * num_points)]
    return _inside(",".join(f"{r * math.sin(a)} {0.08 - r * math.cos(a)}" for r, a in zip(radii, angles, strict=True)))


def _five_squares(x: Coordinate, y: Coordinate) -> Region:
    """Four squares in the corners and one in the middle."""
    in_thirds = (np.abs(x) < 1 / 3).astype(np.int8) + (np.abs(y) < 1 / 3)
    inside: Region = (in_thirds != 1) & (np.maximum(np.abs(x), np.abs(y)) < 1)
    return inside


_THIRD = 1 / 3
SHAPES: Final[Mapping[str, Shape]] = {
    "triangle": _inside("0 -1, 1 1, -1 1"),
    "square": _inside("-1 -1, 1 -1, 1 1, -1 1"),
    "plus": _inside(
        f"-{_THIRD} -1, {_THIRD} -1, {_THIRD} -{_THIRD}, 1 -{_THIRD}, 1 {_THIRD}, {_THIRD} {_THIRD}, "
        f"{_THIRD} 1, -{_THIRD} 1, -{_THIRD} {_THIRD}, -1 {_THIRD}, -1 -{_THIRD}, -{_THIRD} -{_THIRD}"
    ),
    "circle": lambda x, y: x * x + y * y < 1,
    "tee": _inside(
        f"-1 -1, 1 -1, 1 -{_THIRD}, {_THIRD} -{_THIRD}, {_THIRD} 1, -{_THIRD} 1, -{_THIRD} -{_THIRD}, -1 -{_THIRD}"
    ),
    "rhombus": _inside("0 -1, 1 -1, 0 1, -1 1"),
    "pentagon": _inside("0 -1, 1 -0.2, 0.61 1, -0.61 1, -1 -0.2"),
    "star": _star(),
    "five squares": _five_squares,
    "trapezoid": _inside("-1 -1, 1 -1, 0.35 1, -0.35 1"),
}


def _honeycomb(x: Coordinate, y: Coordinate, rng: Generator) -> Region:
    """The borders of hexagons."""
    x, y = x / 1.3, y / 1.3
    height = math.sqrt(3)
    from_centre = []
    for shift in (0.0, 0.5):
        u = np.abs(phase(x + shift) - 0.5)
        v = np.abs(phase(y / height + shift) - 0.5) * height
        from_centre.append(np.maximum(u, u / 2 + v * (height / 2)))
    return np.minimum(*from_centre) > 0.37


def _noise(x: Coordinate, y: Coordinate, rng: Generator) -> Region:
    is_on = rng.random((_NUM_CELLS, _NUM_CELLS)) < 0.5
    return is_on[_cell(y * 3), _cell(x * 3)]


def _rain(x: Coordinate, y: Coordinate, rng: Generator) -> Region:
    """Short lines that all have one direction, at random places."""
    column = _cell(x / 0.45)
    along = y / 1.6 + rng.random(_NUM_CELLS)[column]
    is_line = rng.random((_NUM_CELLS, _NUM_CELLS)) < 0.9
    return is_line[_cell(along), column] & (phase(along) < 0.65) & (phase(x / 0.45) < 0.5)


def _pluses(x: Coordinate, y: Coordinate, rng: Generator) -> Region:
    row = np.floor(y / 1.2)
    u, v = np.abs(phase(x / 1.2 + row / 2) - 0.5), np.abs(phase(y / 1.2) - 0.5)
    return (np.minimum(u, v) < 0.12) & (np.maximum(u, v) < 0.4)


def _cell(distance: Coordinate) -> NDArray[np.intp]:
    """Return the number of the cell of each point, modulo the number of random cells."""
    return np.floor(distance).astype(np.intp) % _NUM_CELLS


TEXTURES: Final[Mapping[str, Texture]] = {
    "solid": lambda x, y, rng: np.ones(x.shape, dtype=np.bool_),
    "stripes": lambda x, y, rng: phase(y) < 0.4,
    "grid": lambda x, y, rng: np.minimum(phase(x), phase(y)) < 0.3,
    "honeycomb": _honeycomb,
    "dots": lambda x, y, rng: np.hypot(phase(x) - 0.5, phase(y) - 0.5) < 0.36,
    "noise": _noise,
    "triangles": lambda x, y, rng: np.abs(phase(x) - 0.5) < 0.5 * phase(y),
    "zigzags": lambda x, y, rng: phase(y + np.abs(phase(x / 2) - 0.5) * 2) < 0.4,
    "rain": _rain,
    "pluses": _pluses,
}
COLOURS: Final[Mapping[str, tuple[float, float, float]]] = {
    "red": (1.0, 0.0, 0.0),
    "green": (0.0, 1.0, 0.0),
    "blue": (0.0, 0.0, 1.0),
    "yellow": (1.0, 1.0, 0.0),
    "pink": (1.0, 0.4, 1.0),
    "cyan": (0.0, 1.0, 1.0),
    "purple": (0.3, 0.0, 0.5),
    "ocean": (0.1, 0.4, 0.5),
    "orange": (1.0, 0.6, 0.0),
    "white": (1.0, 1.0, 1.0),
}
CORRELATED: Final = ("texture", "colour")  # the labels that can follow the shape


def draw(
    shape: Shape, texture: Texture, colour: tuple[float, float, float], *, size: int, rng: Generator
) -> NDArray[np.uint8]:
    """Draw one picture, (size, size, 3) uint8. Angles and places are drawn from `rng`."""
    half = _SHAPE_SIZE * size / (2 * _PUBLISHED_SIZE)
    turn, turn_of_texture = rng.uniform(-_MAX_TURN, _MAX_TURN, 2)
    reach = half * (math.cos(turn) + abs(math.sin(turn)))  # of the turned square, from its centre to its sides
    centre_x, centre_y = rng.uniform(reach, size - reach, 2)
    # Only the square around the shape is computed; the rest is background.
    rows, columns = (
        slice(max(0, int(centre - reach)), min(size, int(centre + reach) + 1)) for centre in (centre_y, centre_x)
    )
    column, row = np.meshgrid(*(_points(pixels) for pixels in (columns, rows)))
    covered = shape(*turned((column - centre_x) / half, (row - centre_y) / half, turn))
    period = max(_PERIOD * size / _PUBLISHED_SIZE, _LEAST_PERIOD)
    shift_x, shift_y = rng.uniform(0, 1, 2)
    x, y = turned(column / period, row / period, turn_of_texture)
    covered &= texture(x + shift_x, y + shift_y, rng)
    picture = np.full((size, size, 3), _BACKGROUND)
    picture[rows, columns] += (np.array(colour) - _BACKGROUND) * per_pixel(covered, _OVERSAMPLING)
    image: NDArray[np.uint8] = np.rint(255 * picture).astype(np.uint8)
    return image


def _points(pixels: slice) -> NDArray[np.float64]:
    """Return the points of some pixels along one axis."""
    return (np.arange(pixels.start * _OVERSAMPLING, pixels.stop * _OVERSAMPLING) + 0.5) / _OVERSAMPLING


class TrifeatureOptions(Schema):
    """The options of the source trifeature.

    correlation: the probability that a correlated label takes the number of the shape.
    correlated: the labels that do.
    image_size: height and width in pixels, 48 or more; it stands in the description.
    """

    correlation: Share = 0.0
    correlated: Literal["texture,colour", "texture", "colour"] = "texture,colour"
    image_size: Annotated[ImageSize, Field(ge=SMALLEST_IMAGE_SIZE)] = Field(DEFAULT_IMAGE_SIZE, exclude=True)


@dataclass(frozen=True)
class Trifeature:
    """A source of `num_records` pictures.

    Picture `number` and its labels depend on (seed, split, number) and on the options alone. The train and the test
    split hold the same combinations, at other places and angles.
    """

    seed: int
    split: str
    num_records: int
    options: TrifeatureOptions
    options_schema: ClassVar[type[Schema]] = TrifeatureOptions

    @classmethod
    def open(cls, given: SourceInputs) -> Self:
        num_records = given.limit or DEFAULT_NUM_RECORDS[given.split]
        return cls(given.seed, given.split, num_records, given.read(TrifeatureOptions))

    @property
    def description(self) -> str:
        options, correlated = self.options, ""
        if options.correlation:
            names = options.correlated.replace(",", " and ")
            correlated = f", {names} correlated with the shape by {options.correlation}"
        return f"trifeature, {options.image_size} pixels{correlated}"

    @property
    def labels(self) -> Mapping[str, LabelColumn]:
        return {
            BASE: LabelColumn("shape", tuple(SHAPES), np.arange(self.num_records) % _NUM_CLASSES),
            "texture": LabelColumn("texture", tuple(TEXTURES), self._drawn["texture"]),
            "colour": LabelColumn("colour", tuple(COLOURS), self._drawn["colour"]),
        }

    @cached_property
    def _drawn(self) -> dict[str, NDArray[np.int64]]:
        """Draw texture and colour of each picture, (num_records,) each, by the law of the module's docstring."""
        num_blocks = -(-self.num_records // _NUM_COMBINATIONS)
        columns: dict[str, list[NDArray[np.int64]]] = {name: [] for name in CORRELATED}
        shape_N = np.arange(_NUM_COMBINATIONS) % _NUM_CLASSES
        for block in range(num_blocks):
            rng = generator(self.seed, f"trifeature labels {self.split}", block)
            pair_N = rng.permuted(np.tile(np.arange(_NUM_CLASSES**2)[:, None], _NUM_CLASSES), axis=0).reshape(-1)
            for name, number_N in (("texture", pair_N % _NUM_CLASSES), ("colour", pair_N // _NUM_CLASSES)):
                share = self.options.correlation if name in self.options.correlated else 0
                columns[name].append(np.where(rng.random(_NUM_COMBINATIONS) < share, shape_N, number_N))
        return {name: np.concatenate(parts)[: self.num_records] for name, parts in columns.items()}

    def __getitem__(self, number: int) -> Record:
        texture, colour = (int(self._drawn[name][number]) for name in CORRELATED)
        picture = draw(
            tuple(SHAPES.values())[number % _NUM_CLASSES],
            tuple(TEXTURES.values())[texture],
            tuple(COLOURS.values())[colour],
            size=self.options.image_size,
            rng=generator(self.seed, f"trifeature {self.split}", number),
        )
        return Record(picture)
