"""Multi-crop views: what global and local views show, their sizes, their draws; what does not fit is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from configs import resolve_recipe
from data_pipeline.core.counter_rng import keys_of_rows
from data_pipeline.core.errors import UserError
from trainer.preflight import check_input_shape
from trainer.views import ExpertImageConfig, MultiCropConfig, ViewsInputs
from trainer.views.expert_image import NO_VIEWS

CROP_ONLY = NO_VIEWS.model_copy(update={"area": (0.05, 0.4)})


def pictures() -> Tensor:
    return torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_global_views_are_those_of_the_expert_policy() -> None:
    config = MultiCropConfig()
    keys = keys_of_rows(pictures(), seed=3, step=1, view=1)
    expected = ExpertImageConfig(area=(0.4, 1.0)).build(ViewsInputs(3))(pictures(), keys)
    assert torch.equal(config.build(ViewsInputs(3))(pictures(), keys), expected)


@pytest.mark.parametrize(("local_size", "size"), [(None, (32, 16)), (24, (24, 12)), (64, (64, 32))])
def test_local_views_keep_the_shape_of_pictures_that_are_not_square(
    local_size: int | None, size: tuple[int, int]
) -> None:
    """A domino has twice as many rows as columns; squares of it would show everything twice as wide as it is."""
    config = MultiCropConfig(local_size=local_size, local_views=CROP_ONLY)
    tall = torch.rand(5, 3, 64, 32, generator=torch.Generator().manual_seed(0))
    found = config.build(ViewsInputs(3)).further_view(tall, keys_of_rows(tall, seed=3, step=1, view=2))
    assert tuple(found.shape[2:]) == config.further_size(height=64, width=32) == size


@pytest.mark.parametrize(("local_size", "size"), [(None, 16), (12, 12), (32, 32)])
def test_local_views_are_expert_views_in_fewer_pixels(local_size: int | None, size: int) -> None:
    config = MultiCropConfig(local_size=local_size, local_views=CROP_ONLY)
    policy, keys = config.build(ViewsInputs(3)), keys_of_rows(pictures(), seed=3, step=1, view=2)
    found = policy.further_view(pictures(), keys)
    assert found.shape == (5, 3, size, size) == (5, 3, *config.further_size(height=32, width=32))
    assert 0 <= found.min() <= found.max() <= 1
    whole = CROP_ONLY.build(ViewsInputs(3))(pictures(), keys)
    if size == 32:
        torch.testing.assert_close(found, whole)
    torch.testing.assert_close(found.mean((2, 3)), whole.mean((2, 3)), rtol=0, atol=0.01)  # the same window


def test_every_local_view_has_draws_of_its_own_that_depend_on_the_keys_alone() -> None:
    policy = MultiCropConfig().build(ViewsInputs(3))
    of_views = [policy.further_view(pictures(), keys_of_rows(pictures(), seed=3, step=1, view=v)) for v in (2, 3, 2)]
    assert torch.equal(of_views[0], of_views[2])
    assert not torch.equal(of_views[0], of_views[1])
    some = policy.further_view(pictures()[3:], keys_of_rows(pictures()[3:], seed=3, step=1, view=2, first_row=3))
    torch.testing.assert_close(some, of_views[0][3:])


def test_what_does_not_fit_is_one_sentence() -> None:
    crops = "views={kind: multi_crop, num_local: 3}"
    with pytest.raises(UserError, match=r"objective\.kind=nt_xent takes two views of a sample, but .* makes 5; set"):
        resolve_recipe("debug:image", [crops])
    config = resolve_recipe("debug:image", ["views={kind: multi_crop, local_size: 40}", "objective.kind=dino"])
    with pytest.raises(UserError, match=r"data: views\.local_size is 40, but the pictures have 32 x 32 pixels; set it"):
        check_input_shape(config, height=32, width=32, where="data")
    config = resolve_recipe("debug:image", [crops, "objective.kind=dino", "encoder={kind: convnet, in_channels: 6}"])
    with pytest.raises(UserError, match=r"data: colour jitter .* got 6; set jitter_probability=0"):
        check_input_shape(config, height=32, width=32, where="data")
    nets = [f"encoder={{kind: convnet, dense_size: {size}}}" for size in (8, "null")]
    one_size, any_size = (resolve_recipe("debug:image", [crops, "objective.kind=dino", net]) for net in nets)
    with pytest.raises(UserError, match=r"data: .* its dense layer is for 32 x 32.* set"):
        check_input_shape(one_size, height=32, width=32, where="data")
    check_input_shape(any_size, height=32, width=32, where="data")
