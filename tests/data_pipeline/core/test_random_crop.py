"""Boxes of random-resized crops against torchvision's law."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms import v2

from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.random_crop import CropLaw, random_resized_crops
from tests.data_pipeline.building.draws import keys_of as keys
from tests.trainer.views.kolmogorov import ks_p_value

NUM = 2000
LAW = CropLaw((0.08, 1.0), (3 / 4, 4 / 3), purpose=0)  # the default of torchvision


def same_size(num: int, height: int, width: int) -> Tensor:
    return torch.tensor([[height, width]]).expand(num, 2)


def their_boxes(transform: v2.RandomResizedCrop, num: int, height: int, width: int) -> list[list[int]]:
    picture = torch.empty(3, height, width, device="meta")
    drawn = [transform.make_params([picture]) for _ in range(num)]
    return [[box[name] for name in ("top", "left", "height", "width")] for box in drawn]


@pytest.mark.parametrize(
    ("height", "width", "scale"),
    [(400, 500, (0.08, 1.0)), (500, 333, (0.9, 1.0)), (32, 32, (0.2, 1.0)), (100, 1000, (0.2, 1.0))],
)
def test_boxes_have_torchvisions_law(height: int, width: int, scale: tuple[float, float]) -> None:
    """Most attempts fail with a scale of at least 0.9, and in the long picture, whose boxes are then in the middle."""
    torch.manual_seed(0)
    theirs = np.array(their_boxes(v2.RandomResizedCrop(32, scale=scale), NUM, height, width))
    ours = random_resized_crops(same_size(NUM, height, width), keys(NUM), replace(LAW, scale=scale)).numpy()
    for field, name in enumerate(("top", "left", "height", "width")):
        assert ks_p_value(ours[:, field], theirs[:, field]) > 1e-3, name
    for axis, side in ((0, height), (1, width)):
        slack, expected = (side - boxes[:, axis] - boxes[:, axis + 2] for boxes in (ours, theirs))
        assert ks_p_value(slack, expected) > 1e-3
    aspect, expected = (boxes[:, 3] / boxes[:, 2] for boxes in (ours, theirs))
    assert ks_p_value(aspect, expected) > 1e-3


@given(
    size=st.tuples(st.integers(1, 3000), st.integers(1, 3000)),
    low=st.floats(0.2, 2.0),
    spread=st.floats(1.0, 3.0),
)
def test_the_box_in_the_middle_is_torchvisions(size: tuple[int, int], low: float, spread: float) -> None:
    """No attempt at twice the area of the picture fits."""
    ratio = (low, low * spread)
    (theirs,) = their_boxes(v2.RandomResizedCrop(32, scale=(2, 2), ratio=ratio), 1, *size)
    ours = random_resized_crops(same_size(1, *size), keys(1), CropLaw((2, 2), ratio, purpose=0))
    assert ours.tolist() == [theirs]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 20_000), st.integers(1, 20_000)), min_size=1, max_size=20),
    seed=st.integers(0, 1 << 40),
)
def test_every_box_is_inside_its_picture(sizes: list[tuple[int, int]], seed: int) -> None:
    sizes_B2 = torch.tensor(sizes)
    top_B, left_B, height_B, width_B = random_resized_crops(sizes_B2, keys(len(sizes), seed=seed), LAW).unbind(1)
    assert torch.stack([top_B, left_B]).min() >= 0
    assert torch.stack([height_B, width_B]).min() >= 1
    assert (top_B + height_B <= sizes_B2[:, 0]).all()
    assert (left_B + width_B <= sizes_B2[:, 1]).all()


def test_a_box_depends_on_its_picture_and_keys_alone() -> None:
    sizes_B2 = torch.randint(1, 2000, (100, 2), generator=torch.Generator().manual_seed(0))
    whole = random_resized_crops(sizes_B2, keys(100), LAW)
    order_B = torch.randperm(100, generator=torch.Generator().manual_seed(1))[:37]
    part_keys = DrawKeys(seed=0, epoch=0, index_B=order_B, view=0)
    assert torch.equal(random_resized_crops(sizes_B2[order_B], part_keys, LAW), whole[order_B])
    for others in (keys(100, seed=1), keys(100, epoch=1), keys(100, view=1)):
        assert (random_resized_crops(sizes_B2, others, LAW) != whole).any(dim=1).double().mean() > 0.8
    assert (random_resized_crops(sizes_B2, keys(100), replace(LAW, purpose=1)) != whole).any(
        dim=1
    ).double().mean() > 0.8
