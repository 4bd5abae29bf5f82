"""The settings of feature suppression: options, bits, colours and dominoes, each with a truth that is planted in it.

Shapes: B batch, C channels, H height, W width, N bits or digits.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.building.build import build_dataset
from data_pipeline.building.catalogue import open_picture_overlay
from data_pipeline.core.batch import Batch
from data_pipeline.core.counter_rng import row_hashes
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import BASE, MASK_BOX, MASK_OBJECT, MASK_OUTSIDE, NO_LABEL, OVERLAY
from data_pipeline.loading.whole import read_all
from data_pipeline.overlays import OverlayInputs, PixelOverlay, object_mask
from data_pipeline.overlays.bits import Bits, bits_of
from data_pipeline.overlays.colours import COLOURS, grey
from data_pipeline.overlays.dominoes import Dominoes, halve_rows
from data_pipeline.sources.digits import resize, sklearn_digits
from data_pipeline.storage.store import SampleStore
from data_pipeline.tools.preview import draw_grid
from tests.data_pipeline.building.draws import CHI_SQUARE, chi_square, is_uniform, keys_of, random_pictures
from tests.data_pipeline.stored_samples import find_problems


def opened(
    kind: str, *, counts: tuple[int, ...] = (1,) * 10, shape: tuple[int, int, int] = (3, 32, 32), **options: Any
) -> PixelOverlay:
    options = {"digits": "sklearn", **options} if kind == "dominoes" else options
    class_counts = {BASE: counts} if counts else {}
    return open_picture_overlay(OverlayInputs(kind, shape, "train", class_counts=class_counts, options=options))


def labels_of(overlay: PixelOverlay, base_B: torch.Tensor) -> torch.Tensor:
    """Return the labels that the overlay draws for black pictures of these classes."""
    pictures = torch.zeros(len(base_B), 3, 32, 32, dtype=torch.uint8)
    return overlay.forward(pictures, keys_of(len(base_B)), {BASE: base_B}).label_B


def write_mnist(root: Path, *, num: int, prefix: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """Write `num` made-up digits of a split in MNIST's format, and return them with their labels."""
    rng = np.random.default_rng(len(prefix))
    digits, labels = rng.integers(0, 256, (num, 28, 28), dtype=np.uint8), np.arange(num, dtype=np.uint8) % 10
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    sizes = [size.to_bytes(4, "big") for size in (num, 28, 28)]
    (raw / f"{prefix}-images-idx3-ubyte").write_bytes(bytes([0, 0, 8, 3]) + b"".join(sizes) + digits.tobytes())
    (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1]) + sizes[0] + labels.tobytes())
    return digits, labels


def whole(location: Path, **choices: Any) -> Batch:
    return next(read_all(SampleStore(location), batch_size=10_000, **choices))


# --- options


# --- bits


def test_bits_are_uniform_and_independent_of_each_other_and_of_small_changes() -> None:
    pictures = random_pictures(20_000, shape=(1, 8, 8))
    bit_BN = bits_of(pictures, 20)
    for first in range(20):
        assert is_uniform(bit_BN[:, first], 2)
    for start in (0, 5, 10, 15):  # five bits at a time
        assert is_uniform((bit_BN[:, start : start + 5] * 2 ** torch.arange(5)).sum(1), 32)
    correlations = np.corrcoef(bit_BN.numpy().T) - np.eye(20)
    assert np.abs(correlations).max() < 5 / np.sqrt(len(pictures))
    changed = pictures.clone()
    changed[:, 0, 3, 3] += 1  # one grey level of one pixel
    assert abs(float((bits_of(changed, 20) != bit_BN).double().mean()) - 0.5) < 0.01
    assert is_uniform(bits_of(torch.arange(20_000).view(torch.uint8).view(-1, 1, 1, 8), 1)[:, 0], 2)


def test_bits_are_those_of_the_picture_in_any_batch_epoch_and_view() -> None:
    pictures, overlay = random_pictures(300, shape=(1, 28, 28)), Bits(bits=7)
    before = pictures.clone()
    found = overlay(pictures, keys_of(300))
    assert torch.equal(pictures, before)
    assert found.inputs.shape == (300, 8, 28, 28)
    assert torch.equal(found.inputs[:, :1], pictures)
    shown_BN = found.inputs[:, 1:, 0, 0]
    assert torch.equal(found.inputs[:, 1:], shown_BN[:, :, None, None].expand(-1, -1, 28, 28))
    labels = torch.stack([found.labels[name] for name in (OVERLAY, *(f"bit_{n}" for n in range(2, 8)))], dim=1)
    assert torch.equal(shown_BN, (labels * 255).to(torch.uint8))
    again = overlay(pictures[[5, 5, 200]], keys_of(3, epoch=9))
    assert torch.equal(again.inputs, found.inputs[[5, 5, 200]])
    assert torch.equal(row_hashes(pictures.flatten(1))[5:6], row_hashes(pictures[5:6].flatten(1)))
    assert overlay(pictures[:0], keys_of(0)).inputs.shape == (0, 8, 28, 28)


def test_the_hash_is_that_recorded() -> None:
    """A dataset names its bits by their number alone, so they may not change."""
    assert row_hashes(torch.arange(24, dtype=torch.uint8).view(2, 12)).tolist() == RECORDED_HASHES


RECORDED_HASHES = [8803537496450556943, 12844674507973364]


def test_no_bits_add_nothing_and_keep_a_label_that_cannot_be_seen() -> None:
    pictures = random_pictures(50, shape=(1, 28, 28))
    found = opened("bits", shape=(1, 28, 28), bits=0)(pictures, keys_of(50))
    assert torch.equal(found.inputs, pictures)
    assert (list(found.labels), set(found.label_B.tolist())) == ([OVERLAY], {0, 1})


def test_a_dataset_of_mnist_with_bits(tmp_path: Path) -> None:
    write_mnist(tmp_path, num=120)
    build = partial(
        build_dataset, "mnist_bits", root=tmp_path, source_options={"kind": "mnist_test_for_test"}, overlay="online"
    )
    manifest = build(tmp_path / "out", overlay_options={"bits": 3}, limit=60)
    assert (manifest.input_shape, manifest.batch_shape) == ((1, 28, 28), (4, 28, 28))
    assert manifest.how_made.source_options == {"kind": "mnist_test_for_test"}
    assert list(manifest.labels) == [BASE, OVERLAY, "bit_2", "bit_3"]
    batch = whole(tmp_path / "out")
    assert tuple(batch.inputs_a.shape[1:]) == manifest.batch_shape
    values = batch.inputs_a.double() / 255
    np.testing.assert_allclose(manifest.batch_mean, values.mean(dim=(0, 2, 3)), rtol=1e-9)
    np.testing.assert_allclose(manifest.batch_std, values.std(dim=(0, 2, 3), correction=0), rtol=1e-9)
    assert torch.equal(whole(tmp_path / "out").inputs_a, batch.inputs_a)
    assert not find_problems(tmp_path / "out")
    draw_grid(str(tmp_path / "out"), num_samples=4)
    out = tmp_path / "baked"
    baked = build_dataset("mnist_bits", out, root=tmp_path, overlay_options={"bits": 2}, limit=60)
    assert baked.input_shape == baked.batch_shape == (3, 28, 28)
    assert torch.equal(whole(out).inputs_a, batch.inputs_a[:, :3])
    assert not find_problems(out)
    with pytest.raises(UserError, match="pictures of 4 channels cannot be stored; draw with `--overlay online`"):
        build_dataset("mnist_bits", tmp_path / "no", root=tmp_path, overlay_options={"bits": 3}, limit=60)


# --- correlations


@pytest.mark.parametrize(
    ("kind", "correlation"), [("colours", 0.0), ("dominoes", 0.3), ("dominoes", 0.9), ("colours", 1.0)]
)
def test_a_class_follows_the_base_label_as_often_as_asked(kind: str, correlation: float) -> None:
    num = 5_000
    overlay, base_B = opened(kind, correlation=correlation), torch.arange(num) % 10
    label_B = labels_of(overlay, base_B)
    assert is_uniform(label_B, 10)
    share = float((label_B == base_B).double().mean())
    expected = correlation + (1 - correlation) / 10
    assert abs(share - expected) <= 4 * np.sqrt(expected * (1 - expected) / num)
    others_B = ((label_B - base_B) % 10)[label_B != base_B]
    if len(others_B):  # those that do not follow it are uniform
        assert chi_square(np.bincount(others_B.numpy(), minlength=10)[1:], 1 / 9) < CHI_SQUARE[9]
    groups = np.bincount((10 * base_B + label_B).numpy(), minlength=100)  # the pairs of which the worst is reported
    shares_of_pairs = np.full((10, 10), (1 - correlation) / 100) + np.eye(10) * correlation / 10
    if correlation < 1:
        assert chi_square(groups, shares_of_pairs.ravel()) < CHI_SQUARE[99]
    else:
        assert (groups.reshape(10, 10) == np.diag(np.full(10, num // 10))).all()


@pytest.mark.parametrize("kind", ["colours", "dominoes"])
def test_classes_beyond_ten_and_records_without_a_class(kind: str) -> None:
    overlay = opened(kind, correlation=1.0)
    base_B = torch.cat([torch.arange(100), torch.full((5_000,), NO_LABEL)])
    label_B = labels_of(overlay, base_B)
    assert torch.equal(label_B[:100], torch.arange(100) % 10)
    assert is_uniform(label_B[100:], 10)
    with pytest.raises(UserError, match=f"the overlay {kind} with correlation=1 follows the label base, and these pi"):
        opened(kind, counts=(), correlation=1)
    assert opened(kind, counts=(), correlation=0)


# --- colours


@pytest.mark.parametrize("num_channels", [1, 3])
def test_a_picture_is_painted_in_the_colour_of_its_label(num_channels: int) -> None:
    pictures = random_pictures(200, shape=(num_channels, 28, 28))
    found = opened("colours", shape=(num_channels, 28, 28))(pictures, keys_of(200))
    colours = np.array(list(COLOURS.values()))[found.label_B.numpy()]
    brightness = grey(pictures).numpy().astype(np.float64)
    expected = np.rint(brightness * colours[:, :, None, None] / 255)
    np.testing.assert_array_equal(found.inputs.numpy(), expected.astype(np.uint8))
    assert len(set(COLOURS.values())) == len(COLOURS) == 10
    np.testing.assert_array_equal(grey(pictures[:, :1]).numpy(), pictures[:, :1].numpy())


def test_the_mask_of_a_coloured_picture_is_its_object_and_the_box_around_it() -> None:
    inside = torch.zeros(2, 5, 6, dtype=torch.bool)
    inside[0, 1, 2] = inside[0, 3, 4] = True
    mask = object_mask(inside)
    expected = torch.full((5, 6), MASK_OUTSIDE, dtype=torch.uint8)
    expected[1:4, 2:5] = MASK_BOX
    expected[1, 2] = expected[3, 4] = MASK_OBJECT
    assert torch.equal(mask[0], expected)
    assert (mask[1] == MASK_OUTSIDE).all()


# --- dominoes


@pytest.mark.parametrize("place", ["above", "below"])
def test_a_domino_is_the_photo_and_a_digit_of_its_class(place: str) -> None:
    pictures, overlay = random_pictures(100), opened("dominoes", digit=place)
    assert isinstance(overlay, Dominoes)
    found = overlay(pictures, keys_of(100))
    assert found.inputs.shape == (100, 3, 64, 32)
    assert found.masks_BHW is not None
    halves = found.inputs.split(32, dim=2)
    digits, photos = halves if place == "above" else halves[::-1]
    digit_mask, photo_mask = (found.masks_BHW.split(32, dim=1))[:: 1 if place == "above" else -1]
    assert torch.equal(photos, pictures)
    assert (photo_mask == MASK_OUTSIDE).all()
    assert torch.equal(digit_mask == MASK_OBJECT, digits[:, 0] > 0)
    assert ((digit_mask == MASK_OBJECT) | (digit_mask == MASK_BOX)).all()
    source = sklearn_digits(split="train")
    known = {resize(image, 32).tobytes(): int(label) for image, label in zip(source.images, source.labels, strict=True)}
    for digit_CHW, label in zip(digits, found.label_B.tolist(), strict=True):
        assert torch.equal(digit_CHW[0], digit_CHW[2])
        assert known[digit_CHW[0].contiguous().numpy().tobytes()] == label


def test_digits_of_a_class_are_drawn_uniformly() -> None:
    digits = torch.arange(40, dtype=torch.uint8)[:, None, None].expand(40, 8, 8).contiguous()
    overlay = Dominoes(digits, torch.arange(40) // 4)
    found = overlay(torch.zeros(20_000, 1, 8, 8, dtype=torch.uint8), keys_of(20_000))
    number_B = found.inputs[:, 0, 0, 0].to(torch.int64)
    assert torch.equal(number_B // 4, found.label_B)
    assert chi_square(np.bincount(number_B.numpy(), minlength=40), 1 / 40) < 85  # 39 degrees of freedom
    with pytest.raises(UserError, match="the digits hold no 9; choose other digits"):
        Dominoes(digits[:36], torch.arange(36) // 4)


def test_a_square_domino_has_half_of_the_rows() -> None:
    pictures = random_pictures(20)
    tall, square = (opened("dominoes", join=join)(pictures, keys_of(20)) for join in ("tall", "square"))
    assert torch.equal(tall.label_B, square.label_B)
    assert square.inputs.shape == (20, 3, 32, 32)
    mean = (tall.inputs[:, :, ::2].double() + tall.inputs[:, :, 1::2].double()) / 2
    assert torch.equal(square.inputs, torch.floor(mean + 0.5).to(torch.uint8))
    assert torch.equal(halve_rows(tall.inputs), square.inputs)
    assert square.masks_BHW is not None
    assert ((square.masks_BHW != MASK_OUTSIDE).any(dim=2).sum(dim=1) == 16).all()
