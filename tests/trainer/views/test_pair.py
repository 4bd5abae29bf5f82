"""Two views of a batch from a seed and a step: the same each time, other ones in each row and on each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from data_pipeline.audio.log_mel import FSDD
from data_pipeline.core.counter_rng import DrawKeys, keys_of_rows
from data_pipeline.core.errors import UserError
from trainer.views import build_view_policy, two_views
from trainer.views.channel_dropout import ChannelDropoutConfig
from trainer.views.expert_audio import SpectralConfig
from trainer.views.expert_image import NO_VIEWS, ExpertImageConfig, huang_views
from trainer.views.random_mask import RandomMaskConfig
from trainer.views.viewmaker import ViewmakerConfig

CONFIGS: list[Any] = [
    ExpertImageConfig(),
    RandomMaskConfig(),
    ChannelDropoutConfig(shared="view"),
    ViewmakerConfig(base_width=4, num_res_blocks=1),
]


def pictures(num: int = 4) -> Tensor:
    return torch.randint(256, (num, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_views_are_those_of_the_keys_and_bytes_are_those_of_floats(config: Any) -> None:
    policy = build_view_policy(config, image_channels=3)
    a, b = two_views(policy, pictures(), seed=5, step=9)
    inputs = pictures() / 255
    for view, expected in ((0, a), (1, b)):
        keys = DrawKeys(seed=5, epoch=9, index_B=torch.arange(4), view=view)
        assert torch.equal(policy(inputs, keys), expected)
        assert torch.equal(policy(inputs, keys_of_rows(inputs, seed=5, step=9, view=view)), expected)
    assert not torch.equal(a, b)
    assert torch.equal(two_views(policy, inputs, seed=5, step=9)[1], b)
    for seed, step in ((6, 9), (5, 10)):
        assert not torch.equal(two_views(policy, inputs, seed=seed, step=step)[0], a)


def test_ranks_have_the_views_of_one_process() -> None:
    policy = build_view_policy(ExpertImageConfig(), image_channels=3)
    whole = two_views(policy, pictures(), seed=0, step=0)
    for rank in (0, 1):
        own = two_views(policy, pictures()[2 * rank : 2 * rank + 2], seed=0, step=0, first_row=2 * rank)
        for of_rank, of_all in zip(own, whole, strict=True):
            torch.testing.assert_close(of_rank, of_all[2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_pictures_of_a_type_or_range_that_views_do_not_take_are_refused(config: Any) -> None:
    policy = build_view_policy(config, image_channels=3)
    with pytest.raises(UserError, match=r"floating type in \[0, 1\], got uint8; divide bytes by 255"):
        policy(pictures(), keys_of_rows(pictures(), seed=0, step=0))
    for wrong in (pictures().float(), pictures() / 255 - 0.5):
        with pytest.raises(UserError, match=r"pictures must be in \[0, 1\], got values from"):
            two_views(policy, wrong, seed=0, step=0)


def test_waveforms_of_int16_have_the_views_of_stored_sounds() -> None:
    policy = build_view_policy(SpectralConfig(), image_channels=1, mel=FSDD)
    draw = torch.Generator().manual_seed(0)
    points_BT = torch.randint(-32_768, 32_768, (2, FSDD.num_points), dtype=torch.int16, generator=draw)
    of_points = two_views(policy, points_BT, seed=0, step=0)
    of_floats = two_views(policy, points_BT.float() / 32_768, seed=0, step=0)
    assert all(torch.equal(one, other) for one, other in zip(of_points, of_floats, strict=True))


def test_waveforms_that_were_not_divided_are_refused_and_sums_of_two_sounds_are_not() -> None:
    policy = build_view_policy(SpectralConfig(), image_channels=1, mel=FSDD)
    sum_BT = torch.full((2, FSDD.num_points), 1.05)
    two_views(policy, sum_BT, seed=0, step=0)
    for wrong_BT in (3_000 * sum_BT, -3_000 * sum_BT):
        with pytest.raises(UserError, match=r"waveforms must be in \[-1, 1\], got values from .* by 32,768"):
            two_views(policy, wrong_BT, seed=0, step=0)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.int32, torch.int64, torch.bool, torch.complex64])
def test_only_bytes_are_divided_by_255(dtype: torch.dtype) -> None:
    policy = build_view_policy(RandomMaskConfig(), image_channels=3)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(UserError, match=rf"got {name} of shape \(4, 3, 16, 16\); convert them to floats"):
        two_views(policy, pictures().to(dtype), seed=0, step=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("config", [ExpertImageConfig(), NO_VIEWS, huang_views("abe")], ids=["usual", "none", "abe"])
def test_expert_views_of_any_floating_type_are_those_of_float32_in_that_type(
    config: ExpertImageConfig, dtype: torch.dtype
) -> None:
    policy = build_view_policy(config, image_channels=3)
    inputs = (pictures() / 255).to(dtype)
    views = two_views(policy, inputs, seed=0, step=0)
    for view, of_float32 in zip(views, two_views(policy, inputs.float(), seed=0, step=0), strict=True):
        assert view.dtype == dtype
        assert torch.equal(view, of_float32.to(dtype))


def test_expert_views_are_the_same_under_autocast() -> None:
    policy = build_view_policy(ExpertImageConfig(), image_channels=3)
    expected = two_views(policy, pictures(), seed=0, step=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = two_views(policy, pictures(), seed=0, step=0)
    assert all(torch.equal(one, other) for one, other in zip(under, expected, strict=True))
