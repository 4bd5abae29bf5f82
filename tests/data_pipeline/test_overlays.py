from __future__ import annotations

import string
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from data_pipeline.overlays import Overlay
from data_pipeline.overlays.digits import Digits, shrink
from data_pipeline.overlays.letters import FONT_PATH, Letters, glyph
from data_pipeline.overlays.shapes import Shapes, shape_mask
from data_pipeline.randomness import generator
from data_pipeline.sample import MASK_BOX, MASK_OBJECT, MASK_OUTSIDE, Overlaid
from data_pipeline.sources.digits import DigitSource, mnist_digits, sklearn_digits
from tests.real_data import archive

GREY = np.full((32, 32, 3), 100, dtype=np.uint8)
OVERLAYS = [Shapes(), Digits(sklearn_digits(split="train")), Letters()]
# The chi-square value that uniform draws exceed once in 10,000 times, by degrees of freedom.
CHI_SQUARE = {2: 18.4, 9: 33.7, 25: 58.6, 15: 44.3}


def noise(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def draws(overlay: Overlay, num: int, *, image: np.ndarray = GREY) -> list[Overlaid]:
    return [overlay(image, generator(0, "test", number)) for number in range(num)]


def chi_square(counts: np.ndarray, shares: np.ndarray | float) -> float:
    expected = counts.sum() * np.broadcast_to(shares, counts.shape)
    return float(((counts - expected) ** 2 / expected).sum())


# --- what holds for every overlay


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda overlay: type(overlay).__name__)
def test_an_overlay_is_pure_and_its_mask_is_exact(overlay: Overlay) -> None:
    image = noise()
    before = image.copy()
    first = overlay(image, generator(0, "test", 3))
    again = overlay(image, generator(0, "test", 3))
    other = overlay(255 - image, generator(0, "test", 3))
    np.testing.assert_array_equal(image, before)
    np.testing.assert_array_equal(first.image, again.image)
    np.testing.assert_array_equal(first.mask, other.mask)  # nothing that is drawn depends on the picture
    assert first.label == again.label == other.label
    assert first.image.dtype == first.mask.dtype == np.uint8
    assert {MASK_OUTSIDE, MASK_OBJECT} <= set(np.unique(first.mask)) <= {MASK_OUTSIDE, MASK_BOX, MASK_OBJECT}
    untouched = first.mask != MASK_OBJECT
    np.testing.assert_array_equal(first.image[untouched], image[untouched])
    assert not np.array_equal(first.image, overlay(image, generator(0, "test", 4)).image)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda overlay: type(overlay).__name__)
def test_labels_have_the_stated_frequencies(overlay: Overlay) -> None:
    num_classes = len(overlay.class_names)
    labels = [drawn.label for drawn in draws(overlay, 5000)]
    shares: np.ndarray | float = 1 / num_classes
    if isinstance(overlay, Digits):
        shares = np.bincount(overlay.digits.labels, minlength=10) / len(overlay.digits.labels)
    assert chi_square(np.bincount(labels, minlength=num_classes), shares) < CHI_SQUARE[num_classes - 1]


def test_colours_are_uniform_and_independent_between_channels() -> None:
    black = np.zeros((32, 32, 3), dtype=np.uint8)
    blended = np.stack([drawn.image[18, 16] for drawn in draws(Shapes(), 4000, image=black)])
    levels = np.rint(blended / (180 / 255)).astype(int)
    for channel in levels.T:
        assert chi_square(np.bincount(channel // 16, minlength=16), 1 / 16) < CHI_SQUARE[15]
    assert np.abs(np.corrcoef(levels.T) - np.eye(3)).max() < 4 / np.sqrt(4000)


# --- shapes


def pillow_shape(name: str, image: np.ndarray, fill: tuple[int, ...], mode: str) -> np.ndarray:
    """The published way: Pillow draws with corners at thirds of the picture."""
    low, high = 32 / 3, 64 / 3
    picture = Image.fromarray(image)
    draw = ImageDraw.Draw(picture, mode)
    match name:
        case "square":
            draw.rectangle((low, low, high, high), fill=fill)
        case "triangle":
            draw.polygon([(16, low), (low, high), (high, high)], fill=fill)
        case "ellipse":
            draw.ellipse((low, low, high, high), fill=fill)
    return np.asarray(picture)


@pytest.mark.parametrize(("name", "num_pixels"), [("square", 144), ("triangle", 78), ("ellipse", 112)])
def test_shapes_are_those_that_pillow_draws(name: str, num_pixels: int) -> None:
    inside = shape_mask(name) == MASK_OBJECT
    black = np.zeros((32, 32, 3), dtype=np.uint8)
    np.testing.assert_array_equal(inside, pillow_shape(name, black, (255, 255, 255), "RGB")[..., 0] > 0)
    assert inside.sum() == num_pixels
    box = shape_mask(name) != MASK_OUTSIDE
    assert box[10:22, 10:22].all()
    assert box.sum() == 144


def test_shapes_are_blended_as_pillow_blends() -> None:
    shapes, image = Shapes(), noise()
    for number in range(50):
        rng = generator(0, "test", number)
        drawn = shapes(image, rng)
        replay = generator(0, "test", number)
        label, colour = int(replay.integers(3)), replay.integers(256, size=3).tolist()
        assert drawn.label == label
        reference = pillow_shape(shapes.class_names[label], image, (*colour, 180), "RGBA")
        np.testing.assert_array_equal(drawn.image, reference)


# --- digits


def published_digits(image: np.ndarray, digit: np.ndarray) -> np.ndarray:
    """The published way: the digit as RGBA, made smaller, black made transparent, pasted four times."""
    small = np.array(Image.fromarray(digit).convert("RGBA").resize((10, 10)))
    small[(small[..., :3] == 0).all(axis=-1), 3] = 0
    picture = Image.fromarray(image)
    stamp = Image.fromarray(small)
    for x, y in ((4, 4), (16, 4), (4, 16), (16, 16)):
        picture.paste(stamp, (x, y), stamp)
    return np.asarray(picture)


def check_digits(source: DigitSource) -> None:
    overlay, image = Digits(source), noise()
    squares = np.zeros((32, 32), dtype=bool)
    for row, column in ((slice(4, 14), slice(4, 14)), (slice(4, 14), slice(16, 26))):
        squares[row, column] = True
    squares[16:26] = squares[4:14]
    for number in range(100):
        drawn = overlay(image, generator(0, "test", number))
        chosen = int(generator(0, "test", number).integers(len(source.labels)))
        assert drawn.label == source.labels[chosen]
        np.testing.assert_array_equal(drawn.image, published_digits(image, source.images[chosen]))
        np.testing.assert_array_equal(drawn.mask != MASK_OUTSIDE, squares)
        np.testing.assert_array_equal(drawn.mask[4:14, 4:14], drawn.mask[16:26, 16:26])
        np.testing.assert_array_equal(drawn.mask[4:14, 4:14] == MASK_OBJECT, shrink(source.images[chosen]) > 0)


def test_sklearn_digits_are_drawn_as_published() -> None:
    check_digits(sklearn_digits(split="train"))


def test_mnist_digits_are_drawn_as_published() -> None:
    check_digits(mnist_digits(archive("mnist"), split="train"))


# --- letters

PLACES = (((0, 6), (0, 6)), ((16, 21), (0, 6)), ((0, 6), (16, 21)), ((16, 21), (16, 21)))


def test_letters_are_those_that_pillow_writes_somewhere_in_each_corner() -> None:
    letters, image = Letters(), noise()
    font = ImageFont.truetype(FONT_PATH, 12, layout_engine=ImageFont.Layout.BASIC)
    seen: list[list[tuple[int, int]]] = [[] for _ in PLACES]
    for number in range(400):
        drawn = letters(image, generator(0, "test", number))
        replay = generator(0, "test", number)
        letter = string.ascii_uppercase[int(replay.integers(26))]
        colour = tuple(replay.integers(256, size=3).tolist())
        picture = Image.fromarray(image)
        for place, (xs, ys) in enumerate(PLACES):
            point = int(replay.integers(xs[0], xs[1] + 1)), int(replay.integers(ys[0], ys[1] + 1))
            seen[place].append(point)
            ImageDraw.Draw(picture).text(point, letter, fill=colour, font=font, anchor="la")
        assert letters.class_names[drawn.label] == letter
        np.testing.assert_array_equal(drawn.image, np.asarray(picture))
    for points, (xs, ys) in zip(seen, PLACES, strict=True):
        for axis, (first, last) in zip(np.transpose(points), (xs, ys), strict=True):
            assert (axis.min(), axis.max()) == (first, last)


def test_letter_boxes_are_the_ink_of_the_four_glyphs() -> None:
    letters = Letters()
    for drawn in draws(letters, 300):
        left, top, right, bottom = glyph(letters.class_names[drawn.label]).getbbox() or (0, 0, 0, 0)
        assert (drawn.mask != MASK_OUTSIDE).sum() <= 4 * (right - left) * (bottom - top)
        rows, columns = np.nonzero(drawn.mask)
        for axis, (first, last) in ((rows, (top, 21 + bottom)), (columns, (left, 21 + right))):
            assert first <= axis.min()
            assert axis.max() < last
        for half in (drawn.mask[:, :16], drawn.mask[:, 16:], drawn.mask[:16], drawn.mask[16:]):
            assert (half == MASK_OBJECT).any()


def test_only_the_w_and_the_q_can_lose_pixels_at_the_edge() -> None:
    lost = {}
    for letter in string.ascii_uppercase:
        _, top, right, bottom = glyph(letter).getbbox() or (0, 0, 0, 0)
        assert top == 2
        lost[letter] = (max(0, 21 + right - 32), max(0, 21 + bottom - 32))
    assert {letter: pixels for letter, pixels in lost.items() if pixels != (0, 0)} == {"W": (1, 0), "Q": (0, 2)}


@pytest.mark.parametrize("make", [Shapes, Letters])
def test_labels_do_not_depend_on_the_base_picture(make: Callable[[], Overlay]) -> None:
    overlay = make()
    labels = [[drawn.label for drawn in draws(overlay, 50, image=noise(seed))] for seed in (1, 2)]
    assert labels[0] == labels[1]
