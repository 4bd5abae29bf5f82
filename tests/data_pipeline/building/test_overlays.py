"""Overlays: what is drawn is what the published code draws, by Pillow and NumPy; draws are pure, fair and independent.

Shapes: B batch, C channels, H height, W width, T points of a waveform, N digits.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from data_pipeline import overlays
from data_pipeline.audio.waveform import crop_last
from data_pipeline.core.counter_rng import DrawKeys, integers
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import MASK_BOX, MASK_OBJECT, MASK_OUTSIDE, Layout
from data_pipeline.overlays import (
    FIRST_PURPOSE,
    Layer,
    Overlay,
    OverlayInputs,
    PictureOverlay,
    baked_keys,
    divide_by_255,
    evaluation_keys,
    letters,
    scaled,
)
from data_pipeline.overlays.bits import Bits
from data_pipeline.overlays.boolean import Boolean
from data_pipeline.overlays.colours import Colours
from data_pipeline.overlays.digits import Digits
from data_pipeline.overlays.dominoes import Dominoes
from data_pipeline.overlays.letters import FONT_PATH, Letters, drawing_points
from data_pipeline.overlays.noise import Crop, Noise
from data_pipeline.overlays.registry import NAMES, OVERLAYS, find_overlay, kind_of, load_overlay, save_overlay
from data_pipeline.overlays.second_digit import SecondDigit
from data_pipeline.overlays.shapes import Shapes, shape_mask
from data_pipeline.overlays.shared_number import SharedNumber
from data_pipeline.overlays.tiled_digit import TiledDigit
from data_pipeline.sources.digits import resize, sklearn_digits
from tests.data_pipeline.building.draws import CHI_SQUARE, chi_square, is_uniform, keys_of, random_pictures


def as_pillow(picture_CHW: Tensor) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(picture_CHW.permute(1, 2, 0).numpy()))


def from_pillow(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


@NAMES.register("stripes")
class Stripes(PictureOverlay):
    """A row or a column of the picture in one colour: how small a new overlay can be."""

    class_names = ("row", "column")

    def draw(self, keys: DrawKeys) -> Layer:
        label_B = integers(keys, 1, 2, purpose=FIRST_PURPOSE)[:, 0]
        colour_BC = integers(keys, 3, 256, purpose=FIRST_PURPOSE + 1).to(torch.uint8)
        place_B = integers(keys, 1, self.drawn_size, purpose=FIRST_PURPOSE + 2)[:, 0]
        line_BW = torch.arange(self.drawn_size, device=label_B.device) == place_B[:, None]
        mask_BHW = torch.where(label_B[:, None, None] == 0, line_BW[:, :, None], line_BW[:, None, :]) * MASK_OBJECT
        mask_BHW = mask_BHW.to(torch.uint8)
        return Layer(label_B, colour_BC[:, :, None, None], mask_BHW, mask_BHW)  # opaque: MASK_OBJECT is 255


@cache
def make_at(kind: str, image_size: int = 32, layout: Layout = "scaled") -> PictureOverlay:
    match kind:
        case "shapes":
            return Shapes(image_size=image_size, layout=layout)
        case "digits":
            return Digits.of(sklearn_digits(split="train"), image_size=image_size, layout=layout)
        case "letters":
            return Letters(image_size=image_size, layout=layout)
    return Stripes(image_size=image_size, layout=layout)


def shapes() -> PictureOverlay:
    return make_at("shapes")


def capitals() -> PictureOverlay:
    return make_at("letters")


all_kinds = pytest.mark.parametrize("kind", ["shapes", "digits", "letters", "stripes"])


# --- what holds for every overlay of pictures


@all_kinds
@pytest.mark.parametrize(("size", "layout"), [(32, "scaled"), (48, "scaled"), (48, "tiled")])
def test_an_overlay_is_pure_and_its_mask_is_exact(kind: str, size: int, layout: Layout) -> None:
    overlay, pictures, keys = (
        make_at(kind, size, layout),
        random_pictures(40, shape=(3, size, size)),
        keys_of(range(40)),
    )
    before, state = pictures.clone(), torch.get_rng_state()
    first, again, other = overlay(pictures, keys), overlay(pictures, keys), overlay(255 - pictures, keys)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(pictures, before)
    assert first.masks_BHW is not None
    assert other.masks_BHW is not None
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.masks_BHW, other.masks_BHW)  # nothing that is drawn depends on the pictures
    assert torch.equal(first.label_B, other.label_B)
    assert first.inputs.dtype == first.masks_BHW.dtype == torch.uint8
    assert (first.inputs.shape, first.masks_BHW.shape) == ((40, 3, size, size), (40, size, size))
    assert {MASK_OUTSIDE, MASK_OBJECT} <= set(first.masks_BHW.unique().tolist())
    assert set(first.masks_BHW.unique().tolist()) <= {MASK_OUTSIDE, MASK_BOX, MASK_OBJECT}
    untouched = (first.masks_BHW != MASK_OBJECT)[:, None].expand_as(pictures)
    assert torch.equal(first.inputs[untouched], pictures[untouched])
    assert (first.masks_BHW == MASK_OBJECT).flatten(1).any(dim=1).all()
    some_B = torch.tensor([39, 3, 17])
    some = overlay(pictures[some_B], keys_of(some_B))
    for name in ("inputs", "masks_BHW", "label_B"):
        assert torch.equal(getattr(some, name), getattr(first, name)[some_B]), name
    assert overlay(pictures[:0], keys_of(range(0))).inputs.shape == (0, 3, size, size)
    for name in ("seed", "epoch", "view"):
        assert not torch.equal(overlay(pictures, keys_of(range(40), **{name: 1})).inputs, first.inputs), name


@all_kinds
def test_labels_have_the_stated_frequencies_and_are_independent(kind: str) -> None:
    overlay = make_at(kind)
    num_classes = len(overlay.class_names)
    label_B = overlay.draw(keys_of(range(2_500))).label_B
    shares: np.ndarray | float = 1 / num_classes
    if isinstance(overlay, Digits):
        shares = np.bincount(overlay.label_N.numpy(), minlength=10) / len(overlay.label_N)
    assert chi_square(np.bincount(label_B.numpy(), minlength=num_classes), shares) < CHI_SQUARE[num_classes - 1]
    others = {name: overlay.draw(keys_of(range(2_500), **{name: 1})).label_B for name in ("seed", "epoch", "view")}
    for name, other_B in (*others.items(), ("index", label_B.roll(1))):
        assert abs(np.corrcoef(label_B, other_B)[0, 1]) < 4 / 50, name


@pytest.mark.parametrize("kind", ["shapes", "letters"])
def test_colours_are_uniform_and_independent(kind: str) -> None:
    layer = make_at(kind).draw(keys_of(range(3_600)))
    colour_BC = layer.colour_BCHW[:, :, 0, 0].to(torch.int64)
    for channel_B in colour_BC.T:
        assert is_uniform(channel_B // 16, 16)
        assert (int(channel_B.min()), int(channel_B.max())) == (0, 255)
    together = np.corrcoef(np.column_stack([colour_BC.numpy(), layer.label_B.numpy()]).T)
    assert np.abs(together - np.eye(4)).max() < 4 / 60


def test_the_keys_of_builds_and_of_evaluation_are_apart() -> None:
    index_B = torch.arange(200)
    keys = {
        "training, view 0": keys_of(index_B),
        "training, view 1": keys_of(index_B, view=1),
        "evaluation": evaluation_keys(index_B, draw=0),
        "evaluation, another draw": evaluation_keys(index_B, draw=1),
        "baked, train": baked_keys(index_B, seed=0, split="train"),
        "baked, test": baked_keys(index_B, seed=0, split="test"),
        "baked, another seed": baked_keys(index_B, seed=1, split="test"),
    }
    labels = {tuple(capitals().draw(key).label_B.tolist()) for key in keys.values()}
    assert len(labels) == len(keys)
    again = evaluation_keys(index_B, draw=0)
    assert torch.equal(capitals().draw(again).label_B, capitals().draw(keys["evaluation"]).label_B)


def test_division_by_255_rounds_to_the_nearest() -> None:
    total = torch.arange(255 * 255 + 1, dtype=torch.int32)
    assert torch.equal(divide_by_255(total), torch.from_numpy(np.rint(total.numpy() / 255).astype(np.int32)))


# --- other sizes

# The first digits of the sha256 of pictures, labels and masks, recorded when 32 pixels was the only size.
RECORDED = {"shapes": "87fe499e677fce19", "digits": "f32356ca37d02e5d", "letters": "8320bc530125fa30"}


def test_overlays_of_32_pixels_are_those_recorded() -> None:
    """With made-up glyphs and digits, because those of the font depend on the version of Pillow."""
    rng = np.random.default_rng(0)
    pictures = torch.from_numpy(rng.integers(0, 256, (300, 3, 32, 32), dtype=np.uint8))
    glyphs_KHW = torch.from_numpy(rng.integers(0, 256, (26, 24, 24), dtype=np.uint8))
    grey, is_ink = rng.integers(0, 256, (50, 10, 10), dtype=np.uint8), rng.integers(0, 2, (50, 10, 10), dtype=np.uint8)
    made = {
        "shapes": Shapes(),
        "digits": Digits(torch.from_numpy(grey * is_ink), torch.arange(50) % 10),
        "letters": Letters(glyphs_KHW),
    }
    for kind, overlay in made.items():
        overlaid = overlay(pictures, keys_of(range(300), seed=3, epoch=1))
        assert overlaid.masks_BHW is not None
        sha256 = hashlib.sha256()
        for part in (overlaid.inputs, overlaid.label_B, overlaid.masks_BHW):
            sha256.update(part.contiguous().numpy().tobytes())
        assert sha256.hexdigest().startswith(RECORDED[kind]), kind


SIZES = (33, 48, 64, 96, 224)


@all_kinds
def test_classes_do_not_depend_on_the_size(kind: str) -> None:
    keys = keys_of(range(50))
    at_32 = make_at(kind, 32).draw(keys).label_B
    for size in (33, 96):
        assert torch.equal(make_at(kind, size).draw(keys).label_B, at_32)


def test_scaled_shapes_fill_the_middle_third() -> None:
    for size in (32, *SIZES):
        square, triangle, ellipse = ((shape_mask(name, size=size) == MASK_OBJECT) for name in Shapes.class_names)
        rows = square.any(dim=1).nonzero()[:, 0]
        first, last = int(rows[0]), int(rows[-1])
        assert first <= size / 3 < first + 1
        assert first == size - 1 - last
        assert torch.equal(square, square.T)
        assert torch.equal(ellipse, ellipse.T)
        assert torch.equal(ellipse, ellipse.flip(0))
        side = last + 1 - first
        assert abs(float(triangle.sum()) / side**2 - 1 / 2) < 1.2 / side
        assert abs(float(ellipse.sum()) / side**2 - np.pi / 4) < 0.5 / side
        for mask in (triangle, ellipse):
            assert mask[first].any()
            assert mask[last].any()
    with pytest.raises(ValueError, match="the shape is 'circle'; give one of square, triangle, ellipse"):
        shape_mask("circle")


def test_scaled_digits_stand_where_the_published_ones_stand() -> None:
    for size, digit_size, (near, far) in (
        (64, 20, (8, 32)),
        (96, 30, (12, 48)),
        (224, 70, (28, 112)),
        (40, 13, (5, 20)),
    ):
        squares = torch.zeros(size, size, dtype=torch.bool)
        for row in (near, far):
            for column in (near, far):
                squares[row : row + digit_size, column : column + digit_size] = True
        overlay = make_at("digits", size)
        assert torch.equal(overlay.draw(keys_of(range(3))).mask_BHW != MASK_OUTSIDE, squares.expand(3, -1, -1))


@pytest.mark.parametrize("size", SIZES)
def test_scaled_letters_lose_as_little_at_the_edge_as_published(size: int) -> None:
    glyphs_KHW = make_at("letters", size).get_buffer("glyphs_KHW")
    right_K, bottom_K = (
        torch.stack([glyph.any(dim=axis).nonzero()[-1, 0] + 1 for glyph in glyphs_KHW]) for axis in (0, 1)
    )
    far = scaled(21, drawn_size=size)
    for letter, right, bottom in zip(string.ascii_uppercase, right_K.tolist(), bottom_K.tolist(), strict=True):
        most_right, most_below = {"W": (1, 0), "Q": (0, 2)}.get(letter, (0, 0))
        assert far + right - size <= most_right * size / 32 + 1, letter
        assert far + bottom - size <= most_below * size / 32 + 2, letter
    x_BP, y_BP = drawing_points(keys_of(range(3_000)), drawn_size=size)
    for place_B, (first, last) in zip(
        [*x_BP.T, *y_BP.T], [(0, 6), (16, 21)] * 2 + [(0, 6)] * 2 + [(16, 21)] * 2, strict=True
    ):
        assert (int(place_B.min()), int(place_B.max())) == tuple(scaled(n, drawn_size=size) for n in (first, last))


@all_kinds
@pytest.mark.parametrize("size", [64, 80])
def test_a_tiled_drawing_repeats_the_published_one(kind: str, size: int) -> None:
    pictures, keys = random_pictures(12, shape=(3, size, size)), keys_of(range(12))
    tiled, published = make_at(kind, size, "tiled")(pictures, keys), make_at(kind, 32)
    assert tiled.masks_BHW is not None
    for top in range(0, size, 32):
        for left in range(0, size, 32):
            part = pictures[:, :, top : top + 32, left : left + 32]
            height, width = part.shape[2:]
            padded = torch.nn.functional.pad(part, (0, 32 - width, 0, 32 - height))
            expected = published(padded, keys)
            assert expected.masks_BHW is not None
            found = tiled.inputs[:, :, top : top + height, left : left + width]
            assert torch.equal(found, expected.inputs[:, :, :height, :width])
            mask = tiled.masks_BHW[:, top : top + height, left : left + width]
            assert torch.equal(mask, expected.masks_BHW[:, :height, :width])


def test_a_large_batch_is_painted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures, keys = random_pictures(7, shape=(3, 64, 64)), keys_of(range(7))
    whole = make_at("letters", 64)(pictures, keys)
    monkeypatch.setattr(overlays, "_VALUES_AT_ONCE", 2 * 3 * 64 * 64)
    in_parts = make_at("letters", 64)(pictures, keys)
    for name in ("inputs", "label_B", "masks_BHW"):
        assert torch.equal(getattr(in_parts, name), getattr(whole, name))


# --- shapes


def pillow_shape(name: str, picture: Image.Image, fill: tuple[int, ...], mode: str) -> Image.Image:
    """The published way: Pillow draws with corners at thirds of the picture."""
    low, high = 32 / 3, 64 / 3
    draw = ImageDraw.Draw(picture, mode)
    match name:
        case "square":
            draw.rectangle((low, low, high, high), fill=fill)
        case "triangle":
            draw.polygon([(16, low), (low, high), (high, high)], fill=fill)
        case "ellipse":
            draw.ellipse((low, low, high, high), fill=fill)
    return picture


@pytest.mark.parametrize(("name", "num_pixels"), [("square", 144), ("triangle", 78), ("ellipse", 112)])
def test_shapes_are_those_that_pillow_draws(name: str, num_pixels: int) -> None:
    inside = (shape_mask(name) == MASK_OBJECT).numpy()
    reference = pillow_shape(name, Image.new("RGB", (32, 32)), (255, 255, 255), "RGB")
    np.testing.assert_array_equal(inside, np.asarray(reference)[..., 0] > 0)
    assert inside.sum() == num_pixels
    box = shape_mask(name) != MASK_OUTSIDE
    assert box[10:22, 10:22].all()
    assert box.sum() == 144


def test_shapes_are_blended_as_pillow_blends() -> None:
    pictures, keys = random_pictures(50), keys_of(range(50))
    layer, overlaid = shapes().draw(keys), shapes()(pictures, keys)
    for row in range(50):
        name, colour = shapes().class_names[overlaid.label_B[row]], layer.colour_BCHW[row, :, 0, 0].tolist()
        reference = pillow_shape(name, as_pillow(pictures[row]), (*colour, 180), "RGBA")
        assert torch.equal(overlaid.inputs[row], from_pillow(reference))
        assert torch.equal(overlaid.masks_BHW[row], shape_mask(name))


# --- digits


def published_small(digit: np.ndarray) -> Image.Image:
    """The published way: the digit as RGBA, made smaller, black made transparent."""
    small = np.array(Image.fromarray(digit).convert("RGBA").resize((10, 10)))
    small[(small[..., :3] == 0).all(axis=-1), 3] = 0
    return Image.fromarray(small)


def test_digits_are_drawn_as_published() -> None:
    source = sklearn_digits(split="train")
    overlay, pictures, keys = Digits.of(source), random_pictures(200), keys_of(range(200))
    squares = torch.zeros(32, 32, dtype=torch.bool)
    squares[4:14, 4:14] = squares[4:14, 16:26] = squares[16:26, 4:14] = squares[16:26, 16:26] = True
    grey_BHW, overlaid = overlay.draw(keys).colour_BCHW[:, 0], overlay(pictures, keys)
    number_of = {resize(digit, 10).tobytes(): number for number, digit in enumerate(source.images)}
    seen = set()
    for row in range(200):
        number = number_of[grey_BHW[row, 4:14, 4:14].numpy().tobytes()]
        seen.add(number)
        reference, stamp = as_pillow(pictures[row]), published_small(source.images[number])
        for x, y in ((4, 4), (16, 4), (4, 16), (16, 16)):
            reference.paste(stamp, (x, y), stamp)
        assert overlaid.label_B[row] == source.labels[number]
        assert torch.equal(overlaid.inputs[row], from_pillow(reference))
        mask = overlaid.masks_BHW[row]
        assert torch.equal(mask != MASK_OUTSIDE, squares)
        assert torch.equal(mask[4:14, 4:14] == MASK_OBJECT, torch.from_numpy(np.array(stamp)[..., 3] > 0))
        assert torch.equal(mask[4:14, 4:14], mask[16:26, 16:26])
    assert len(seen) > 150


# --- letters

PLACES = (((0, 6), (0, 6)), ((16, 21), (0, 6)), ((0, 6), (16, 21)), ((16, 21), (16, 21)))


def box_of(letter: str) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of the ink of a letter that Pillow writes at (0, 0)."""
    picture = Image.new("L", (32, 32))
    font = ImageFont.truetype(FONT_PATH, 12, layout_engine=ImageFont.Layout.BASIC)
    ImageDraw.Draw(picture).text((0, 0), letter, fill=255, font=font, anchor="la")
    return picture.getbbox() or (0, 0, 0, 0)


def test_letters_are_those_that_pillow_writes() -> None:
    """Exact where one copy covers a pixel; within one grey level where copies overlap, which Pillow rounds twice."""
    font = ImageFont.truetype(FONT_PATH, 12, layout_engine=ImageFont.Layout.BASIC)
    x_BP, _ = drawing_points(keys_of(range(20_000)))
    near_B = ((x_BP[:, 1] - x_BP[:, 0] == 10) | (x_BP[:, 3] - x_BP[:, 2] == 10)).nonzero()[:, 0]
    is_wide_B = capitals().draw(keys_of(near_B)).label_B == string.ascii_uppercase.index("W")
    index_B = torch.cat([torch.arange(150), near_B[is_wide_B]])
    pictures, keys = random_pictures(len(index_B)), keys_of(index_B)
    layer, overlaid = capitals().draw(keys), capitals()(pictures, keys)
    x_BP, y_BP = drawing_points(keys)
    num_overlaps = 0
    for row in range(len(index_B)):
        letter = string.ascii_uppercase[overlaid.label_B[row]]
        colour = tuple(layer.colour_BCHW[row, :, 0, 0].tolist())
        reference, copies = as_pillow(pictures[row]), np.zeros((32, 32), dtype=int)
        for point in zip(x_BP[row].tolist(), y_BP[row].tolist(), strict=True):
            ImageDraw.Draw(reference).text(point, letter, fill=colour, font=font, anchor="la")
            ink = Image.new("L", (32, 32))
            ImageDraw.Draw(ink).text(point, letter, fill=255, font=font, anchor="la")
            copies += np.asarray(ink) > 0
        difference = (overlaid.inputs[row].int() - from_pillow(reference).int()).abs().amax(dim=0).numpy()
        assert difference[copies <= 1].max() == 0
        assert difference.max() <= 1
        np.testing.assert_array_equal(overlaid.masks_BHW[row].numpy() == MASK_OBJECT, copies > 0)
        num_overlaps += (copies > 1).sum()
    assert num_overlaps > 10


def test_letters_stand_evenly_over_their_ranges_and_independently() -> None:
    x_BP, y_BP = drawing_points(keys_of(range(10_000)))
    for place, ranges in enumerate(PLACES):
        for axis_BP, (first, last) in zip((x_BP, y_BP), ranges, strict=True):
            value_B = axis_BP[:, place]
            assert (int(value_B.min()), int(value_B.max())) == (first, last)
            assert is_uniform(value_B - first, last - first + 1)
    label_B1 = capitals().draw(keys_of(range(2_500))).label_B[:, None]
    together = np.corrcoef(torch.cat([x_BP[:2_500], y_BP[:2_500], label_B1], dim=1).T.numpy())
    assert np.abs(together - np.eye(9)).max() < 4 / 50


def test_letter_boxes_are_the_ink_of_the_four_glyphs() -> None:
    keys = keys_of(range(300))
    layer, (x_BP, y_BP) = capitals().draw(keys), drawing_points(keys)
    for row in range(300):
        left, top, right, bottom = box_of(capitals().class_names[layer.label_B[row]])
        boxes = torch.zeros(32, 32, dtype=torch.bool)
        for x, y in zip(x_BP[row].tolist(), y_BP[row].tolist(), strict=True):
            boxes[y + top : y + bottom, x + left : x + right] = True
        assert torch.equal(layer.mask_BHW[row] != MASK_OUTSIDE, boxes)


# --- noise


def toy_sounds(length: int = 1_000) -> list[Tensor]:
    """Three sounds that say where they are: class k rises from about k to k + 1."""
    return [1e-3 * (number + torch.arange(1, length + 1) / length) for number in range(3)]


def toy_noise(*, length: int = 1_000, volume: float = 0.5, crop: Crop = "first_or_last", num_points: int = 40) -> Noise:
    return Noise.of(toy_sounds(length), num_points=num_points, volume=volume, crop=crop)


def offsets_of(noise: Noise, keys: DrawKeys, *, length: int) -> tuple[Tensor, Tensor]:
    """(B,) int64 each: the classes, and where the crops begin, from what is heard behind silence by `toy_noise`."""
    overlaid = noise(torch.zeros(len(keys.index_B), noise.num_points), keys)
    scaled = torch.stack([noise.volume * sound / sound.max() for sound in toy_sounds(length)])
    first_B1 = overlaid.inputs[:, :1]
    offset_B = (scaled[overlaid.label_B] - first_B1).abs().argmin(dim=1)
    heard = scaled[overlaid.label_B[:, None], offset_B[:, None] + torch.arange(noise.num_points)]
    assert (overlaid.inputs - heard).abs().max() < 1e-6
    return overlaid.label_B, offset_B


@pytest.mark.parametrize("crop", ["first", "first_or_last", "random_offset"])
def test_noise_is_added_to_speech_that_stays_as_it_is(crop: Crop) -> None:
    noise, keys = toy_noise(crop=crop), keys_of(range(30))
    speech = torch.rand(30, 40, generator=torch.Generator().manual_seed(0)) * 2 - 1
    before = speech.clone()
    mixed, alone = noise(speech, keys), noise(torch.zeros(30, 40), keys)
    assert torch.equal(speech, before)
    assert torch.equal(mixed.inputs, speech + alone.inputs)
    assert torch.equal(mixed.label_B, alone.label_B)
    assert mixed.inputs.dtype == torch.float32
    some_B = torch.tensor([29, 4])
    assert torch.equal(noise(speech[some_B], keys_of(some_B)).inputs, mixed.inputs[some_B])


def test_the_loudest_point_is_sought_in_the_whole_recording() -> None:
    sounds = [torch.full((1_000,), 0.1) for _ in range(3)]
    for sound in sounds:
        sound[500] = -0.4  # in no crop
    noise = Noise.of(sounds, num_points=40, volume=0.5, crop="first_or_last")
    torch.testing.assert_close(noise(torch.zeros(9, 40), keys_of(range(9))).inputs, torch.full((9, 40), 0.125))


def test_noise_classes_are_even_and_differ_between_views_in_two_thirds() -> None:
    noise, silence = toy_noise(num_points=1), torch.zeros(10_000, 1)
    first_B, second_B = (noise(silence, keys_of(range(10_000), view=view)).label_B for view in (0, 1))
    assert is_uniform(first_B, 3)
    counts = np.bincount((3 * first_B + second_B).numpy(), minlength=9)
    assert chi_square(counts, 1 / 9) < 31.8  # once in 10,000 times, at 8 degrees of freedom
    assert abs((first_B == second_B).float().mean() - 1 / 3) < 4 * (2 / 9 / 10_000) ** 0.5
    assert torch.equal(noise(silence, keys_of(range(10_000))).label_B, first_B)  # one draw for both views is one class


def test_crops_are_the_first_or_the_last_evenly_and_whatever_the_speech() -> None:
    keys = keys_of(range(10_000))
    label_B, offset_B = offsets_of(toy_noise(length=1_000), keys, length=1_000)
    assert set(offset_B.tolist()) == {0, 960}
    is_last_B = (offset_B > 0).to(torch.int64)
    assert is_uniform(is_last_B, 2)
    together = np.corrcoef(np.stack([is_last_B, label_B, crop_last(keys)]).astype(float))
    assert np.abs(together - np.eye(3)).max() < 4 / 100
    assert set(offsets_of(toy_noise(crop="first"), keys_of(range(50)), length=1_000)[1].tolist()) == {0}


def test_random_offsets_are_even_over_the_whole_recording() -> None:
    noise = toy_noise(crop="random_offset", length=45)
    label_B, offset_B = offsets_of(noise, keys_of(range(10_000)), length=45)
    assert set(offset_B.tolist()) == {0, 1, 2, 3, 4, 5}
    assert is_uniform(offset_B, 6)
    assert abs(np.corrcoef(label_B, offset_B)[0, 1]) < 4 / 100


def dominoes() -> Dominoes:
    return Dominoes.open(overlay_inputs("dominoes"))


def overlay_inputs(name: str, **options: str) -> OverlayInputs:
    return OverlayInputs(name=name, shape=(3, 32, 32), split="train", options={"digits": "sklearn", **options})


# --- saved and read back

SAVED: dict[str, Callable[[], Overlay]] = {
    **{kind: partial(make_at, kind, 96, "tiled") for kind in ("shapes", "digits", "letters")},
    "noise": toy_noise,
    "bits": Bits,
    "colours": partial(Colours, correlation=0.5),
    "dominoes": dominoes,
    "second_digit": lambda: SecondDigit.open(overlay_inputs("second_digit", size="20")),
    "tiled_digit": lambda: TiledDigit.open(overlay_inputs("tiled_digit", blend="opaque")),
    "shared_number": lambda: SharedNumber.open(overlay_inputs("shared_number", length="2")),
    "boolean": partial(Boolean, degree=2, easy_degree=1, size=3, correlation=0.5),
}


def some_inputs(overlay: Overlay) -> Tensor:
    if isinstance(overlay, Noise):
        return torch.linspace(-1, 1, 50 * 40).view(50, 40)
    size = overlay.image_size if isinstance(overlay, PictureOverlay) else 32
    return random_pictures(50, shape=(3, size, size))


def test_every_overlay_has_a_name() -> None:
    assert set(SAVED) == set(OVERLAYS)
    assert {kind: kind_of(make()) for kind, make in SAVED.items()} == {kind: kind for kind in SAVED}
    assert kind_of(Stripes()) == "stripes"


def test_a_saved_overlay_has_the_recorded_bytes(tmp_path: Path) -> None:
    """In every process: hash seeds differ, and with them the order of some containers."""
    assert save_overlay(Bits(bits=3), tmp_path / "bits").startswith("3a391a23c6b25f47")
    assert save_overlay(make_at("shapes", 64, "tiled"), tmp_path / "shapes").startswith("e79ab4e565652271")


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAVED)
def test_a_saved_overlay_draws_the_same(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overlay, path, keys = SAVED[kind](), tmp_path / "overlay.safetensors", keys_of(range(50), epoch=3)
    sha256 = save_overlay(overlay, path)
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert save_overlay(overlay, tmp_path / "again") == sha256
    monkeypatch.setattr(letters, "render_glyphs", lambda _: pytest.fail("glyphs come from the file"))
    loaded = load_overlay(path, sha256=sha256)
    assert type(loaded) is find_overlay(kind)
    assert loaded.class_names == overlay.class_names
    inputs = some_inputs(overlay)
    one, other = overlay(inputs, keys), loaded(inputs, keys)
    assert one.labels.keys() == other.labels.keys()
    parts = [(one.inputs, other.inputs), (one.masks_BHW, other.masks_BHW)]
    for mine, theirs in [*parts, *((one.labels[name], other.labels[name]) for name in one.labels)]:
        assert (mine is theirs is None) or torch.equal(mine, theirs)
    assert save_overlay(loaded, tmp_path / "third") == sha256


def test_an_overlay_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "overlay.safetensors"
    with pytest.raises(UserError, match=r"overlay\.safetensors cannot be read"):
        load_overlay(path, sha256="")
    sha256 = save_overlay(capitals(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match="is not the file that the manifest names"):
        load_overlay(path, sha256=sha256)
    data = safetensors.torch.save({}, metadata={"overlay": json.dumps({"kind": "letter", "options": {}})})
    path.write_bytes(data)
    with pytest.raises(UserError, match="holds an unknown overlay 'letter'"):
        load_overlay(path, sha256=hashlib.sha256(data).hexdigest())
