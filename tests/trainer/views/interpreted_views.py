"""Check the kernels of expert views on a CPU, in the interpreter of Triton, against the form in torch.

    TRITON_INTERPRET=1 python -m tests.trainer.views.interpreted_views CHECK

Triton reads the variable when it is imported, so this is a process of its own; `test_expert_image_kernels.py` starts
it.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from unittest import mock

import pytest
import torch
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys
from trainer import triton_works
from trainer.views import expert_image, expert_image_kernels
from trainer.views.expert_image import NO_VIEWS, ExpertImage, ExpertImageConfig, draw, huang_views

STRONG = ExpertImageConfig(brightness=1, contrast=1, saturation=1, hue=0.5, jitter_probability=1, blur_sigma=(0.1, 9))
GAUSSIAN, SIMCLR = ExpertImageConfig(blur="gaussian"), ExpertImageConfig(blur="simclr")
COLOURLESS = ExpertImageConfig().without_colours()
# Config, height, width, channels, pictures. The interpreter takes half a second for a picture.
CASES: Final = (
    (ExpertImageConfig(), 32, 32, 3, 4),
    (STRONG, 32, 32, 3, 10),
    (STRONG, 33, 47, 3, 2),
    (STRONG, 17, 31, 3, 2),
    (ExpertImageConfig(), 7, 2, 3, 2),
    (ExpertImageConfig(), 64, 32, 3, 2),
    (ExpertImageConfig(), 96, 80, 3, 2),
    (ExpertImageConfig(area=(0.01, 1.0)), 32, 32, 3, 1),
    (GAUSSIAN, 32, 32, 3, 2),
    (SIMCLR, 64, 64, 3, 2),
    (ExpertImageConfig().without_crop(), 32, 32, 3, 2),
    *((huang_views(letters, strength=1.25), 32, 32, 3, 2) for letters in (*"abcde", "ad", "ce", "abcde")),
    (COLOURLESS, 32, 32, 11, 2),
    (COLOURLESS, 32, 32, 1, 2),
    (NO_VIEWS, 32, 32, 3, 2),
)


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """Let kernels take tensors of a CPU."""
    with mock.patch.object(triton_works, "DEVICE", "cpu"):
        yield


def keys(num: int) -> DrawKeys:
    return DrawKeys(seed=0, epoch=0, index_B=torch.arange(num), view=0)


def pictures(num: int, *, channels: int, height: int, width: int) -> Tensor:
    """Smooth patches, noise, flat greys and primary colours, where HSV has its edges: (num, channels, H, W)."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(num, channels, height, width, generator=generator)
    smooth = torch.nn.functional.interpolate(noise[:, :, :5, :5], size=(height, width), mode="bicubic").clamp(0, 1)
    x = torch.where(torch.arange(num)[:, None, None, None] % 2 == 0, smooth, noise)
    if channels == 3:
        corners = torch.tensor(list(itertools.product([0.0, 1.0], repeat=3))).T.view(3, 2, 4)
        x[:, :, :2, :4] = corners[..., : x.shape[3]]
    x[:, :, 2:4] = 0.5
    return x


def assert_equal_views(found: Tensor, expected: Tensor, case: object) -> None:
    """Every pixel equals that of the form in torch to a 40th of a shade, and the mean to 1e-5."""
    away = (found - expected).abs().max()
    assert away <= 1e-4, f"{case}: a pixel is {away:.1e} away"
    of_mean = (found.mean((2, 3)) - expected.mean((2, 3))).abs().max()
    assert of_mean <= 1e-5, f"{case}: a mean is {of_mean:.1e} away"


def check_views() -> None:
    for config, height, width, channels, num in CASES:
        x = pictures(num, channels=channels, height=height, width=width)
        policy, draws = ExpertImage(config), draw(config, keys(num), size=(height, width))
        if config == GAUSSIAN:
            x = x.bfloat16().float().contiguous(memory_format=torch.channels_last)
        before = x.clone()
        with on_the_cpu():
            found = policy.apply_draws(x, draws)
        assert_equal_views(found, policy.apply_draws(x, draws), (config, height, width))
        assert torch.equal(x, before)
        assert found.is_contiguous()
        assert found.data_ptr() != x.data_ptr()
        assert config != NO_VIEWS or torch.equal(found, x)


def check_the_trial() -> None:
    """Before their first use on a GPU, right kernels pass and wrong ones do not. The second policy here has none."""
    right = expert_image_kernels.views
    for factor in (1.0, 1.1):
        found = mock.Mock(side_effect=[expert_image_kernels] * 2 + [None] * 2)
        wrong = mock.patch.object(expert_image_kernels, "views", lambda x, draws, f=factor: right(x, draws) * f)
        with on_the_cpu(), mock.patch.object(expert_image, "kernels", found), wrong:
            if factor == 1:
                expert_image._try_out(expert_image_kernels, torch.float32)
            else:
                with pytest.raises(ValueError, match="they are 10% away"):
                    expert_image._try_out(expert_image_kernels, torch.float32)
        assert found.call_count == 4


def check_draws() -> None:
    """A product that is added at once may differ in its last bit; all else is equal."""
    tight = ExpertImageConfig(area=(0.98, 1.0), aspect=(1.0, 1.6))  # in four of ten pictures no box fits
    never = ExpertImageConfig(jitter_probability=0, grayscale_probability=0, flip_probability=0, blur_probability=0)
    for config, height, width in ((STRONG, 32, 32), (tight, 64, 48), (huang_views("abcde"), 33, 47), (never, 32, 32)):
        large = dataclasses.replace(keys(3), epoch=3, seed=-(1 << 40), index_B=torch.arange(3) + (1 << 50))
        recorded = dataclasses.replace(large, view=2, recorded_epoch=torch.tensor(7))
        for given in (keys(7), large.two_views(), recorded, recorded.two_views()):
            expected = vars(draw(config, given, size=(height, width)))
            with on_the_cpu():
                found = vars(draw(config, given, size=(height, width)))
            assert found.pop("blur_matrix") is expected.pop("blur_matrix")
            for name, of_torch in expected.items():
                if of_torch is None:
                    assert found[name] is None
                else:
                    tolerance = {"factor_B4": 2e-7, "sigma_B": 1e-6}.get(name, 0)
                    torch.testing.assert_close(found[name], of_torch, atol=tolerance, rtol=0)


CHECKS: Final = {"trial": check_the_trial, "draws": check_draws, "views": check_views}

if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
