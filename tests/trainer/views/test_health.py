from __future__ import annotations

import pytest
import torch

from trainer.views.health import view_health


def test_health_of_known_views() -> None:
    images = torch.full((1, 1, 2, 2), 0.5)
    views = torch.tensor([0.5, 0.0, 1.0, 0.7]).view(1, 1, 2, 2).requires_grad_()
    health = view_health(views, images)
    assert {name: float(value) for name, value in health.items()} == pytest.approx(
        {"budget_spent": 0.3, "clamped_share": 0.5}
    )
    assert not any(value.requires_grad for value in health.values())


def test_a_collapsed_viewmaker_spends_nothing() -> None:
    images = torch.rand(4, 3, 8, 8)
    assert view_health(images, images)["budget_spent"] == 0


def test_views_without_a_clamp_count_what_lies_beyond() -> None:
    views = torch.tensor([-0.1, 0.2, 1.3, 0.4]).view(1, 1, 2, 2)
    assert view_health(views, torch.zeros(1, 1, 2, 2))["clamped_share"] == 0.5
