"""Random masks and their complements: what the views keep, the law of the draws, and what they depend on."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from tests.data_pipeline.building.draws import keys_of as keys
from trainer.views.random_mask import RandomMask, RandomMaskConfig, coins

CONFIGS = [RandomMaskConfig(), RandomMaskConfig(rescale=False)]


def pictures(num: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Without a 0, so that what a view lost can be told from what it kept."""
    return torch.rand(num, 3, 8, 12, generator=torch.Generator().manual_seed(0)).add_(0.01).to(dtype)


def pair(config: RandomMaskConfig, x: Tensor, *, first: int = 0) -> tuple[Tensor, Tensor]:
    policy = RandomMask(config)
    return policy(x, keys(len(x), view=first)), policy(x, keys(len(x), view=first + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS)
def test_two_views_are_disjoint_and_together_the_picture(config: RandomMaskConfig, dtype: torch.dtype) -> None:
    x = pictures(16, dtype=dtype)
    factor = 2 if config.rescale else 1
    for first in (0, 2):
        a, b = pair(config, x, first=first)
        assert a.dtype == b.dtype == dtype
        assert torch.equal(a + b, factor * x)
        assert torch.equal((a != 0) ^ (b != 0), torch.ones_like(x, dtype=torch.bool))
        for view in (a, b):
            assert torch.equal(view[view != 0], (factor * x)[view != 0])


def test_every_value_is_kept_with_probability_one_half_and_independently() -> None:
    """Counts over 3,000 pictures: each entry, pairs of neighbours and channels that agree, and entries of a picture."""
    num = 3000
    keep = coins(keys(num), 3 * 8 * 12).view(num, 3, 8, 12)
    entries = keep[0].numel()
    low, high = stats.binom.interval(1 - 1e-3 / entries, num, 0.5)
    for agree in (
        keep,
        keep[..., 1:] == keep[..., :-1],
        keep[:, :, 1:] == keep[:, :, :-1],
        keep[:, 1:] == keep[:, :-1],
        keep.flatten(1)[:, 30:] == keep.flatten(1)[:, :-30],  # as far apart as the words whose bits the coins are
        keep[1:] == keep[:-1],
    ):
        counts = agree.sum(dim=0)
        assert low <= counts.min()
        assert counts.max() <= high
    kept = keep.flatten(1).sum(dim=1).double()  # 2 / num: the variance of a variance, of a law that is nearly normal
    assert abs(kept.var() / (entries / 4) - 1) < 4 * (2 / num) ** 0.5


def test_pictures_stay_as_they_were_and_get_the_gradient_of_what_is_kept() -> None:
    x = pictures(4).requires_grad_()
    before = x.detach().clone()
    views = RandomMask(RandomMaskConfig())(x, keys(4))
    views.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad * before, views)
    assert torch.equal(x, before)
    assert views.max() <= 2 * x.max()
    assert not list(RandomMask(RandomMaskConfig()).parameters())
