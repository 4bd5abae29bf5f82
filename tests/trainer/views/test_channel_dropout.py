"""Channel dropout: what a view loses, the law of the draws, and which views share them."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from scipy import stats
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys
from trainer.views import ViewsConfig
from trainer.views.channel_dropout import ChannelDropout, ChannelDropoutConfig, draw_kept

NUM_CHANNELS = 5
STEPS = 4_000
Shared = Literal["step", "view"]


def keys(num: int, *, view: int = 0, step: int | Tensor | None = 7) -> DrawKeys:
    return DrawKeys(seed=3, epoch=1, index_B=torch.arange(num), view=view, step=step)


def pictures(num: int) -> Tensor:
    """Without a 0, so that a channel that is lost can be told from one that is not."""
    return torch.rand(num, NUM_CHANNELS, 4, 6, generator=torch.Generator().manual_seed(0)).clamp_(min=0.01)


def kept(views_BCHW: Tensor) -> Tensor:
    """Return (B, C): whether each channel is there, after a check that no channel is there in part."""
    there_BCHW = views_BCHW != 0
    there_BC = there_BCHW.flatten(2).any(dim=2)
    assert torch.equal(there_BCHW, there_BC[:, :, None, None].expand_as(there_BCHW))
    return there_BC


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shared", ["step", "view"])
def test_a_channel_is_lost_as_a_whole_or_stays_as_it_is(shared: Shared, dtype: torch.dtype) -> None:
    policy, x = ChannelDropout(ChannelDropoutConfig(shared=shared)), pictures(64).to(dtype)
    for step in range(6):
        views = policy(x, keys(64, step=step))
        assert views.dtype == dtype
        assert torch.equal(views, x * kept(views)[:, :, None, None].to(dtype))
        assert kept(views).any(dim=1).all()


@pytest.mark.parametrize("rate", [(0.7, 0.7), (0.5, 1.0), (0.0, 1.0), (0.2, 0.4), (0.0, 0.0), (1.0, 1.0)])
def test_the_draws_have_their_law(rate: tuple[float, float]) -> None:
    """Against the probabilities of the definition: of each number of channels that stay, and of each channel."""
    config = ChannelDropoutConfig(rate=rate)
    kept_DC = draw_kept(config, dataclasses.replace(keys(STEPS), step=None), num_channels=NUM_CHANNELS)
    middles = rate[0] + (rate[1] - rate[0]) * (np.arange(1_000) + 0.5) / 1_000
    share = stats.binom(NUM_CHANNELS, 1 - middles[:, None]).pmf(range(NUM_CHANNELS + 1)).mean(axis=0)
    share[1] += share[0]  # the last one stays
    share[0] = 0
    counts = torch.bincount(kept_DC.sum(dim=1), minlength=NUM_CHANNELS + 1).numpy()
    possible = share > 1e-9
    assert counts[~possible].sum() == 0
    if possible.sum() > 1:
        assert stats.chisquare(counts[possible], STEPS * share[possible] / share[possible].sum()).pvalue > 1e-3
    mean = float(share @ range(NUM_CHANNELS + 1)) / NUM_CHANNELS
    low, high = stats.binom.interval(1 - 1e-3 / NUM_CHANNELS, STEPS, mean)
    assert all(low <= num <= high for num in kept_DC.sum(dim=0).tolist())


def test_all_samples_and_both_views_of_a_step_lose_the_same() -> None:
    policy, x = ChannelDropout(ChannelDropoutConfig()), pictures(32)
    of_step = []
    for step in range(40):
        a, b = (kept(policy(x, keys(32, view=view, step=step))) for view in (0, 1))
        assert torch.equal(a, b)
        assert torch.equal(a, a[:1].expand_as(a))
        assert torch.equal(kept(policy(torch.cat([x, x]), keys(32, step=step).two_views())), torch.cat([a, b]))
        of_step.append(a[0])
    assert len({tuple(row.tolist()) for row in of_step}) > 10
    again = kept(policy(x, dataclasses.replace(keys(32), epoch=5, index_B=torch.arange(90, 122), step=39)))
    assert torch.equal(again[0], of_step[39])  # whichever samples the step has


def test_the_views_of_another_update_of_the_step_lose_others() -> None:
    policy, x = ChannelDropout(ChannelDropoutConfig()), pictures(1)
    first, second = ([kept(policy(x, keys(1, view=view, step=step))) for step in range(40)] for view in (0, 2))
    assert not torch.equal(torch.stack(first), torch.stack(second))


def test_each_view_of_each_sample_may_lose_others() -> None:
    policy, x = ChannelDropout(ChannelDropoutConfig(shared="view")), pictures(400)
    a, b = (kept(policy(x, keys(400, view=view))) for view in (0, 1))
    assert not torch.equal(a, b)
    assert not torch.equal(a, a[:1].expand_as(a))
    together = policy(torch.cat([x, x]), keys(400).two_views())
    assert torch.equal(kept(together), torch.cat([a, b]))


def test_without_a_step_both_views_of_a_sample_lose_the_same() -> None:
    policy, x = ChannelDropout(ChannelDropoutConfig()), pictures(400)
    a, b = (kept(policy(x, keys(400, view=view, step=None))) for view in (0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, a[:1].expand_as(a))
    assert torch.equal(kept(policy(torch.cat([x, x]), keys(400, step=None).two_views())), torch.cat([a, b]))


@pytest.mark.parametrize("step", [0, 5, 2**40])
def test_a_step_in_a_tensor_draws_the_same(step: int) -> None:
    policy, x = ChannelDropout(ChannelDropoutConfig()), pictures(8)
    recorded = dataclasses.replace(keys(8, step=torch.tensor(step)), recorded_epoch=torch.tensor(9))
    assert torch.equal(policy(x, recorded), policy(x, keys(8, step=step)))


def test_pictures_of_one_channel_are_refused() -> None:
    sequence = {"kind": "sequence", "parts": [{"kind": "random_mask", "rescale": False}, {"kind": "channel_dropout"}]}
    config = TypeAdapter(ViewsConfig).validate_python(sequence)
    config.check_channels(3)
    with pytest.raises(ValueError, match=r'views of kind "channel_dropout" .* pictures have 1 channel'):
        config.check_channels(1)
    with pytest.raises(ValueError, match="pictures have 1 channel"):
        ChannelDropout(ChannelDropoutConfig())(torch.rand(2, 1, 4, 4), keys(2))
