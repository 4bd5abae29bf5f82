"""The settings whose overlay draws each view by itself: boolean features, and a number in two streams.

Shapes: B batch, C channels, H height, W width, N bits of a half, L digits of a number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from data_pipeline.building.build import build_dataset
from data_pipeline.core.sample import MASK_OUTSIDE, OVERLAY
from data_pipeline.loading.stream import Stream
from data_pipeline.overlays import evaluation_keys
from data_pipeline.overlays.boolean import CORE, Boolean, BooleanOptions
from data_pipeline.overlays.digits import CORNERS
from data_pipeline.overlays.shared_number import SharedNumber
from data_pipeline.sources.digits import sklearn_digits
from tests.data_pipeline.building.draws import is_uniform, keys_of, random_pictures

NUM = 4_000


def boolean(**options: float) -> Boolean:
    return Boolean(**BooleanOptions.model_validate(options).model_dump())


def shared_number(length: int) -> SharedNumber:
    return SharedNumber.of(sklearn_digits(split="train"), length=length)


def bits_shown(overlay: Boolean, pictures: Tensor, **keys: int) -> Tensor:
    found: Tensor = overlay(pictures, keys_of(len(pictures), **keys)).inputs
    assert torch.equal(found, found[:, :, :1, :1].expand_as(found))
    assert ((found == 0) | (found == 255)).all()
    return (found[:, :, 0, 0] > 0).long()


# --- boolean features


@pytest.mark.parametrize(("degree", "easy_degree"), [(1, 1), (2, 1), (3, 2), (4, 4)])
def test_a_feature_is_the_parity_of_its_bits_in_every_view_and_epoch(degree: int, easy_degree: int) -> None:
    overlay, pictures = boolean(degree=degree, easy_degree=easy_degree, size=4), random_pictures(NUM, shape=(1, 8, 8))
    found = overlay(pictures, keys_of(NUM))
    labels = found.labels
    assert found.inputs.shape == (NUM, *overlay.output_shape((1, 8, 8))) == (NUM, 8, 8, 8)
    assert [is_uniform(labels[name], 2) for name in (OVERLAY, CORE)] == [True, True]
    assert is_uniform(labels[OVERLAY] * 2 + labels[CORE], 4)  # independent without a correlation
    for keys in ({}, {"view": 1}, {"epoch": 3}, {"seed": 7}):
        bits_B8 = bits_shown(overlay, pictures, **keys)
        assert torch.equal(bits_B8[:, :degree].sum(1) % 2, labels[CORE])
        assert torch.equal(bits_B8[:, 4 : 4 + easy_degree].sum(1) % 2, labels[OVERLAY])


def test_two_views_have_nothing_in_common_but_the_features() -> None:
    """No bit, and no parity of fewer bits than the degree, tells the feature or the other view."""
    overlay, pictures = boolean(degree=3, easy_degree=2, size=4), random_pictures(NUM, shape=(1, 8, 8))
    core_B = overlay(pictures, keys_of(NUM)).labels[CORE]
    first_B8, second_B8 = bits_shown(overlay, pictures), bits_shown(overlay, pictures, view=1)
    for bits in ([0], [1], [2], [3], [0, 1], [1, 2], [0, 1, 2, 3], [4], [7]):
        parity_B, other_B = (each[:, bits].sum(1) % 2 for each in (first_B8, second_B8))
        assert is_uniform(parity_B * 2 + core_B, 4)
        assert is_uniform(parity_B * 2 + other_B, 4)


@pytest.mark.parametrize("correlation", [0.75, 0.95, 1.0])
def test_features_are_equal_in_the_share_of_the_paper(correlation: float) -> None:
    labels = boolean(correlation=correlation)(random_pictures(NUM, shape=(1, 8, 8)), keys_of(NUM)).labels
    share = (labels[OVERLAY] == labels[CORE]).double().mean().item()
    assert abs(share - (1 + correlation) / 2) < 0.02


# --- a number in two streams


@pytest.mark.parametrize("length", [1, 4])
def test_each_stream_shows_the_number(length: int) -> None:
    overlay, pictures = shared_number(length), random_pictures(300)
    before = pictures.clone()
    first, second = (overlay(pictures, keys_of(300, view=view)) for view in (0, 1))
    assert torch.equal(pictures, before)
    digit_BL = torch.stack(list(first.labels.values()), dim=1)
    assert digit_BL.shape == (300, length)
    assert torch.equal(digit_BL, torch.stack(list(second.labels.values()), dim=1))

    assert not first.inputs[:, 3:].any()
    assert first.masks_BHW is not None
    assert second.masks_BHW is not None
    outside_BHW = first.masks_BHW == MASK_OUTSIDE
    assert torch.equal(first.inputs[:, :3] * outside_BHW[:, None], pictures * outside_BHW[:, None])
    of_class = [overlay.digits_NHW[overlay.label_N == digit] for digit in range(10)]
    for sample in range(20):
        for digit, (row, column) in zip(digit_BL[sample].tolist(), CORNERS, strict=False):
            seen = first.inputs[sample, 0, row : row + 10, column : column + 10]
            inked = of_class[digit] > 0
            assert (torch.where(inked, seen == of_class[digit], True).flatten(1).all(1)).any()

    level_BL = second.inputs[:, 3:, 0, 0].long()
    assert torch.equal(level_BL, digit_BL * 28)
    assert torch.equal(second.inputs[:, 3:], second.inputs[:, 3:, :1, :1].expand(-1, -1, 32, 32))
    grey_BHW = pictures.long().sum(1) // 3
    assert torch.equal(second.inputs[:, :3].long(), grey_BHW[:, None].expand(-1, 3, -1, -1))
    assert (second.masks_BHW == MASK_OUTSIDE).all()

    again = overlay(pictures, evaluation_keys(torch.arange(300), draw=5))
    assert torch.equal(again.inputs, first.inputs)  # as a probe sees it


def test_numbers_are_uniform_and_those_of_the_picture() -> None:
    overlay, pictures = shared_number(2), random_pictures(NUM)
    found = overlay(pictures, keys_of(NUM)).labels
    shares = torch.bincount(overlay.label_N, minlength=10) / len(overlay.label_N)
    for label_B in found.values():
        assert (torch.bincount(label_B, minlength=10) / NUM - shares).abs().max() < 0.025
    alone = overlay(pictures[[7, 9]], keys_of(2, epoch=4)).labels
    assert all(torch.equal(alone[name], found[name][[7, 9]]) for name in found)


def test_a_batch_holds_a_stream_in_each_view(tmp_path: Path) -> None:
    manifest = build_dataset(
        "procedural_shared_number", tmp_path / "out", limit=30, overlay="online", overlay_options={"length": 2}
    )
    assert manifest.batch_shape == (5, 32, 32)
    draws: tuple[Literal["per_view", "per_item"], ...] = ("per_view", "per_item")
    for draw in draws:
        batch = next(iter(Stream(tmp_path / "out", global_batch_size=10, seed=0, end_step=1, overlay_draw=draw)))
        assert [not views[:, 3:].any() for views in (batch.inputs_a, batch.inputs_b)] == [True, draw == "per_item"]
