"""The views of every policy depend on the keys and on the sample, and on nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from data_pipeline.audio.log_mel import FSDD
from data_pipeline.core.counter_rng import DrawKeys
from trainer.views import (
    AdversarialMaskConfig,
    ChannelDropoutConfig,
    ExpertImageConfig,
    MultiCropConfig,
    RandomMaskConfig,
    SpectralConfig,
    ViewmakerConfig,
    WaveformConfig,
    build_view_policy,
)
from trainer.views.composed import ByEpochConfig, PairConfig, SequenceConfig
from trainer.views.expert_image import huang_views

NUM = 9
EXPERT = ExpertImageConfig()
SMALL = ViewmakerConfig(base_width=4, num_res_blocks=1)
WAVEFORM = WaveformConfig(speed=(0.9, 1.1), semitones=(-3, 3))
PICTURE_VIEWS: list[Any] = [
    EXPERT,
    huang_views("abcde"),
    MultiCropConfig(),
    RandomMaskConfig(),
    RandomMaskConfig(rescale=False),
    ChannelDropoutConfig(shared="view"),
    AdversarialMaskConfig(),
    SMALL,
    SMALL.model_copy(update={"dropout_rate": 0.9}),
    SequenceConfig(parts=(EXPERT, SMALL)),
    PairConfig(first=SMALL, second=EXPERT),
    ByEpochConfig(policies=(EXPERT, RandomMaskConfig())),
]
SOUND_VIEWS: list[Any] = [
    SpectralConfig(),
    WaveformConfig(),
    WAVEFORM,
    SMALL.model_copy(update={"clamp": False, "waveform": WAVEFORM}),
    PairConfig(first=SpectralConfig(), second=WaveformConfig()),
]
every_policy = pytest.mark.parametrize("config", PICTURE_VIEWS + SOUND_VIEWS, ids=lambda config: config.kind)


def keys(num: int = NUM, *, seed: int = 0, epoch: int = 0, view: int = 0) -> DrawKeys:
    return DrawKeys(seed=seed, epoch=epoch, index_B=torch.arange(num), view=view)


def policy_and_inputs(config: Any) -> tuple[Any, Tensor]:
    """Return a policy, and pictures or, in float64, sounds of all loudnesses."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    if config in SOUND_VIEWS:
        sounds_BT = torch.randn(NUM, FSDD.num_points, generator=generator, dtype=torch.float64)
        policy = build_view_policy(config, image_channels=1, mel=FSDD).double()
        return policy, sounds_BT * torch.logspace(-4, -1, NUM)[:, None]
    return build_view_policy(config, image_channels=3), torch.rand(NUM, 3, 16, 16, generator=generator)


@every_policy
def test_views_repeat_exactly_and_differ_between_keys(config: Any) -> None:
    policy, inputs = policy_and_inputs(config)
    before = inputs.clone()
    views = policy(inputs, keys())
    assert views.dtype == inputs.dtype
    assert views.shape == ((NUM, 1, 64, 64) if config in SOUND_VIEWS else inputs.shape)
    torch.manual_seed(1)
    assert torch.equal(policy.eval()(inputs, keys(), torch.ones(NUM, 16, 16, dtype=torch.uint8)), views)
    assert torch.equal(inputs, before)
    for other in (keys(view=1), keys(view=2), keys(epoch=2), keys(seed=1)):
        differs_B = ((policy(inputs, other) - views).abs() > 1e-4).flatten(1).any(1)
        assert differs_B.double().mean() > 0.5  # channels, masks and views without a change may be equal by chance


@every_policy
def test_a_view_does_not_depend_on_its_batch(config: Any) -> None:
    """Up to the order of sums in convolutions and Fourier transforms."""
    policy, inputs = policy_and_inputs(config)
    whole = policy(inputs, keys())
    for rows in (slice(0, 5), slice(5, NUM), slice(3, 4)):
        torch.testing.assert_close(policy(inputs[rows], keys().rows(rows)), whole[rows], rtol=0, atol=1e-5)


@pytest.mark.parametrize("config", PICTURE_VIEWS, ids=lambda config: config.kind)
def test_views_are_made_without_waiting_for_the_device(config: Any) -> None:
    """On the meta device there are shapes and no values: whatever would need a value on the host raises."""
    policy, inputs = policy_and_inputs(config)
    on_meta = DrawKeys(seed=0, epoch=0, index_B=torch.arange(NUM, device="meta"), view=1)
    assert policy.to("meta")(inputs.to("meta"), on_meta).shape == inputs.shape


@every_policy
def test_keys_of_other_rows_than_those_of_the_batch_are_refused(config: Any) -> None:
    policy, inputs = policy_and_inputs(config)
    for num in (1, 3):
        with pytest.raises(ValueError, match=f"there are {num} keys for a batch of 9; pass one for each sample"):
            policy(inputs, keys(num))
