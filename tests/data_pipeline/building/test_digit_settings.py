"""MultiDigits and tiled digits: where digits lie, which they are, that no label tells of another, and what is refused.

Shapes: B batch, C channels, H height, W width, N digits to choose from.
"""

from __future__ import annotations

import pickle
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data_pipeline.building.build import build_dataset
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import MASK_BOX, MASK_OBJECT, MASK_OUTSIDE
from data_pipeline.overlays import Overlaid
from data_pipeline.overlays.registry import load_overlay
from data_pipeline.overlays.second_digit import SecondDigit
from data_pipeline.overlays.tiled_digit import TiledDigit, choose_digits
from data_pipeline.sources.digits import DigitSource, resize, sklearn_digits
from data_pipeline.sources.placed_digits import PlacedDigits, PlacedDigitsOptions
from data_pipeline.storage.manifest import OVERLAY_NAME, Manifest
from tests.data_pipeline.building.draws import is_uniform, keys_of

NUM = 2_000


@cache
def digits() -> DigitSource:
    return sklearn_digits(split="train")


@cache
def equal_digits() -> DigitSource:
    """The same number of digits of each class."""
    source = digits()
    rows = np.concatenate([np.flatnonzero(source.labels == label)[:50] for label in range(10)])
    return DigitSource("fifty of each", source.images[rows], source.labels[rows])


def black(num: int, size: int) -> Tensor:
    return torch.zeros(num, 3, size, size, dtype=torch.uint8)


# --- the first digit


@cache
def placed(digit_size: int = 12, image_size: int = 48, seed: int = 0, split: str = "train") -> PlacedDigits:
    options = PlacedDigitsOptions(digit_size=digit_size, image_size=image_size)
    return PlacedDigits(digits(), seed, split, options)


def test_a_placed_digit_is_the_resized_digit_somewhere_on_black() -> None:
    source = placed()
    for number in range(20):
        picture = source[number].content
        assert picture.shape == (48, 48, 3)
        assert (picture == picture[:, :, :1]).all()
        digit = resize(digits().images[number], 12)
        windows = np.lib.stride_tricks.sliding_window_view(picture[:, :, 0], (12, 12))
        found = (windows == digit).all((2, 3)) & (windows.sum((2, 3), dtype=np.int64) == picture[:, :, 0].sum())
        assert found.any(), number
        assert digits().labels[number] == source.labels["base"].label_N[number]


def test_places_are_uniform_and_depend_on_seed_split_and_number_alone() -> None:
    source = placed(digit_size=8, image_size=32)
    middle = np.array([np.argwhere(source[number].content[:, :, 0]).mean(0) for number in range(1_000)])
    assert np.abs(middle.mean(0) - 15.5).max() < 0.8  # the deviation of a mean is 0.23
    assert middle.min() < 5
    assert middle.max() > 26
    again = pickle.loads(pickle.dumps(source))
    assert all((again[number].content == source[number].content).all() for number in (7, 3, 7))
    for other in (placed(8, 32, seed=1), placed(8, 32, split="test")):
        assert any((other[number].content != source[number].content).any() for number in range(5))


# --- the second digit


@cache
def second(size: int = 20, image_size: int = 48) -> SecondDigit:
    return SecondDigit.of(equal_digits(), size=size, image_size=image_size)


def drawn(overlay: SecondDigit | TiledDigit, pictures: Tensor, *, epoch: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return pictures, labels and masks."""
    result = overlay(pictures, keys_of(len(pictures), epoch=epoch))
    assert isinstance(result, Overlaid)
    assert result.masks_BHW is not None
    return result.inputs, result.label_B, result.masks_BHW


def test_the_second_digit_is_one_whole_digit_with_its_mask() -> None:
    inputs, label_B, masks_BHW = drawn(second(), black(50, 48))
    for picture_CHW, mask_HW, label in zip(inputs, masks_BHW, label_B.tolist(), strict=True):
        box = (mask_HW != MASK_OUTSIDE).nonzero()
        (top, left), (bottom, right) = box.min(0).values.tolist(), box.max(0).values.tolist()
        assert (bottom - top, right - left) == (19, 19)
        grey_SS = picture_CHW[0, top : bottom + 1, left : right + 1]
        matches_N = (second().digits_NHW == grey_SS).all(2).all(1)
        assert label in second().label_N[matches_N].tolist()
        assert picture_CHW[0].sum() == grey_SS.sum()
        assert torch.equal(mask_HW == MASK_OBJECT, picture_CHW[0] > 0)


def first_digits(num: int) -> Tensor:
    return torch.stack([torch.from_numpy(placed()[number].content).permute(2, 0, 1) for number in range(num)])


def test_the_second_digit_is_uniform_and_independent_of_the_first() -> None:
    num = min(NUM, placed().num_records)
    _, label_B, _ = drawn(second(), first_digits(num))
    assert is_uniform(label_B, 10)
    agree = float((label_B == torch.from_numpy(placed().labels["base"].label_N[:num])).float().mean())
    assert abs(agree - 0.1) < 4 * (0.09 / num) ** 0.5
    assert torch.equal(label_B, drawn(second(), black(num, 48))[1])


def test_the_second_digit_spares_the_first_where_it_can() -> None:
    pictures = first_digits(300)
    before_BHW = pictures[:, 0].clone()
    inputs, _, masks_BHW = drawn(second(), pictures)
    assert torch.equal(pictures[:, 0], before_BHW)
    assert (inputs[:, 0] >= before_BHW).all()
    first_tries = second().draw(keys_of(300)).mask_BHW
    covered, blind = (
        float(((before_BHW > 0) & (mask == MASK_OBJECT)).flatten(1).any(1).float().mean())
        for mask in (masks_BHW, first_tries)
    )
    assert covered < 0.01
    assert blind > 0.1


def test_a_draw_depends_on_its_key_alone() -> None:
    for overlay in (second(), TiledDigit.of(choose_digits(equal_digits(), 10, seed=0), image_size=48)):
        whole, _, _ = drawn(overlay, black(40, 48))
        part = overlay(black(3, 48), DrawKeys(seed=0, epoch=0, index_B=torch.tensor([30, 2, 11]), view=0))
        assert torch.equal(part.inputs, whole[[30, 2, 11]])
        assert not torch.equal(drawn(overlay, black(40, 48), epoch=1)[0], whole)


# --- tiled digits


def test_tiles_repeat_one_digit_and_leave_the_brighter_pixel() -> None:
    overlay = TiledDigit.of(choose_digits(equal_digits(), 20, seed=0), size=16, image_size=48)
    pictures = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (60, 3, 48, 48), dtype=np.uint8))
    grey_BHW = drawn(overlay, black(60, 48))[0][:, 0]
    inputs, label_B, masks_BHW = drawn(overlay, pictures)
    assert torch.equal(grey_BHW[:, 16:], grey_BHW[:, :-16])
    assert torch.equal(grey_BHW[:, :, 16:], grey_BHW[:, :, :-16])
    assert torch.equal(inputs, pictures.maximum(grey_BHW[:, None]))
    assert torch.equal(masks_BHW == MASK_OBJECT, grey_BHW > 0)
    assert set(masks_BHW.flatten().tolist()) == {MASK_BOX, MASK_OBJECT}
    windows = grey_BHW.unfold(1, 16, 1).unfold(2, 16, 1)  # every copy begins in the first tile
    for window_HWSS, label in zip(windows, label_B.tolist(), strict=True):
        whole = [(window_HWSS[:16, :16] == digit).flatten(2).all(2).any() for digit in overlay.digits_NHW]
        assert label in overlay.label_N[torch.stack(whole)].tolist()


@pytest.mark.parametrize("unique", [3, 20])
def test_there_are_as_many_different_tiled_digits_as_asked(unique: int) -> None:
    overlay = TiledDigit.of(choose_digits(equal_digits(), unique, seed=0), image_size=32)
    assert overlay.size == 16
    inputs, label_B, _ = drawn(overlay, black(NUM, 32))
    assert len({first_of_shifts(picture) for picture in inputs[:60, 0].numpy()}) <= unique
    counts = np.bincount(overlay.label_N.numpy(), minlength=10)
    assert counts.sum() == unique
    assert counts.max() - counts.min() <= 1
    if unique % 10 == 0:
        assert is_uniform(label_B, 10)


def first_of_shifts(picture: np.ndarray) -> bytes:
    """The same bytes for the same tiles at any offset."""
    tile = picture[:16, :16]
    return min(np.roll(tile, (row, column), (0, 1)).tobytes() for row in range(16) for column in range(16))


def test_the_seed_chooses_the_unique_digits_and_more_keep_the_fewer() -> None:
    few, more, other = (choose_digits(digits(), num, seed=seed) for num, seed in ((10, 0), (30, 0), (10, 1)))
    assert (more.images[:10] == few.images).all()
    assert (other.images != few.images).any()
    assert sorted(few.labels.tolist()) == list(range(10))
    assert few.description != other.description


@pytest.mark.parametrize("unique", [0, -1, 501])
def test_more_unique_digits_than_there_are_is_refused(unique: int) -> None:
    with pytest.raises(
        UserError, match=rf"{unique} unique digits were asked for, but fifty of each are 500; give unique"
    ):
        choose_digits(equal_digits(), unique, seed=0)


# --- as datasets


def build(name: str, out: Path, **choices: Any) -> Manifest:
    options = {"digits": "sklearn", **choices.pop("overlay_options", {})}
    return build_dataset(name, out, overlay="online", overlay_options=options, **choices)


def test_train_and_test_set_have_the_same_few_digits(tmp_path: Path) -> None:
    found = {}
    for split in ("train", "test"):
        for unique in (None, 10):
            options = {} if unique is None else {"unique": unique}
            out = tmp_path / f"{split}{unique}"
            manifest = build("procedural_tiled_digit", out, split=split, limit=20, overlay_options=options)
            assert manifest.overlay is not None
            overlay = load_overlay(out / OVERLAY_NAME, sha256=manifest.files[OVERLAY_NAME].sha256)
            assert isinstance(overlay, TiledDigit)
            assert manifest.overlay.options == {"unique": len(overlay.label_N), "size": 16, "blend": "brighter"}
            found[split, unique] = overlay.digits_NHW
    assert torch.equal(found["train", 10], found["test", 10])
    assert len(found["train", None]) == 1_437
    assert len(found["test", None]) == 360  # other digits, as for every overlay of digits
