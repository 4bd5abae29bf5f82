from __future__ import annotations

import pytest
import torch
from torch import Tensor

from data_pipeline.core.sample import MASK_BOX, MASK_OBJECT, MASK_OUTSIDE
from tests.gloo import run_ranks
from trainer.distributed.collectives import rank, world_size
from trainer.views.health import view_health


def one_picture(*values: float) -> Tensor:
    return torch.tensor(values).view(1, 1, 2, -1)


def test_health_of_known_views() -> None:
    images = torch.full((1, 1, 2, 2), 0.5)
    views_a = one_picture(0.5, 0.0, 1.0, 0.7).requires_grad_()
    views_b = one_picture(0.5, 0.4, 0.8, 0.7)
    masks = torch.tensor([[[MASK_OUTSIDE, MASK_BOX], [MASK_OBJECT, MASK_OUTSIDE]]], dtype=torch.uint8)
    health = view_health(views_a, views_b, images, masks)
    assert {name: float(value) for name, value in health.items()} == pytest.approx(
        {
            "changed_share": 1,
            "budget_spent": 0.3,
            "clamped_share": 0.5,
            "evenness": 0.3 / 0.5,
            "diversity": 0.15,
            "inside_over_outside": 0.5 / 0.1,
        }
    )
    assert not any(value.requires_grad for value in health.values())


def test_views_that_are_the_pictures() -> None:
    images = torch.rand(4, 3, 8, 8)
    masks = torch.full((4, 8, 8), MASK_OUTSIDE, dtype=torch.uint8)
    masks[:, 2:4] = MASK_BOX
    health = {name: float(value) for name, value in view_health(images, images, images, masks).items()}
    unchanged = dict.fromkeys(("changed_share", "budget_spent", "clamped_share", "evenness", "diversity"), 0)
    assert health == unchanged | {"inside_over_outside": 1}


def test_over_the_changed_share_means_are_those_of_the_changed_views() -> None:
    """One view in four is changed; the boxes of the four pictures are of different sizes."""
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(4, 3, 8, 8, generator=draw)
    views = images.clone()
    views[2] = (views[2] + torch.randn(3, 8, 8, generator=draw)).clamp(0, 1)
    masks = torch.full((4, 8, 8), MASK_OUTSIDE, dtype=torch.uint8)
    for number in range(4):
        masks[number, 1 : 3 + number, 2:6] = MASK_BOX
    health = view_health(views, None, images, masks)
    alone = view_health(views[2:3], None, images[2:3], masks[2:3])
    assert health["changed_share"] == 0.25
    for name in ("budget_spent", "clamped_share", "evenness"):
        torch.testing.assert_close(health[name] / 0.25, alone[name])
    torch.testing.assert_close(health["inside_over_outside"], alone["inside_over_outside"])


def compared_on_a_rank(views: Tensor, images: Tensor, masks: Tensor) -> float:
    views, images, masks = (tensor.chunk(world_size())[rank()] for tensor in (views, images, masks))
    return float(view_health(views, None, images, masks)["inside_over_outside"])


@pytest.mark.ranks
def test_boxes_are_compared_over_the_pictures_of_all_ranks() -> None:
    """The pictures of the second rank are not changed; of the two of the first, one is."""
    images = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    views = images.clone()
    views[1, :, 2:5, 2:5] += 0.3
    masks = torch.full((4, 8, 8), MASK_OUTSIDE, dtype=torch.uint8)
    masks[:, 1:4, 1:4] = MASK_BOX
    alone = compared_on_a_rank(views, images, masks)
    assert alone > 2
    assert run_ranks(compared_on_a_rank, 2, views, images, masks) == [pytest.approx(alone)] * 2


@pytest.mark.parametrize("level", [MASK_OUTSIDE, MASK_BOX])
def test_without_an_inside_or_an_outside_nothing_is_compared(level: int) -> None:
    views, images = torch.rand(4, 3, 8, 8), torch.rand(4, 3, 8, 8)
    masks = torch.full((4, 8, 8), level, dtype=torch.uint8)
    assert view_health(views, None, images, masks)["inside_over_outside"] == 1


def test_what_is_black_or_white_in_the_picture_was_not_clamped() -> None:
    assert view_health(one_picture(0.0, 0.0, 1.0, 0.4), None, one_picture(0.0, 0.1, 1.0, 1.0), None)[
        "clamped_share"
    ] == pytest.approx(0.25)


def test_evenness_is_the_share_that_carries_the_change() -> None:
    images, views = torch.full((2, 1, 4, 5), 0.5), torch.full((2, 1, 4, 5), 0.5)
    views[0, 0, 0] += 0.1  # a quarter of the first picture
    views[1] -= 0.2
    assert view_health(views, None, images, None)["evenness"] == pytest.approx((0.25 + 1) / 2, rel=1e-5)
