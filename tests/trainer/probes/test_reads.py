"""What probes read, and in which precision."""

from __future__ import annotations

import torch

from configs import resolve_recipe
from data_pipeline.core.counter_rng import DrawKeys
from trainer.modules import build_modules
from trainer.probes.features import frozen
from trainer.probes.reads import InBfloat16


def test_bfloat16_changes_features_and_views_by_its_rounding_and_returns_float32() -> None:
    settings = ["encoder.kind=resnet10", "encoder.width=8", "views.base_width=8"]
    settings += ["encoder.mean=[0.5,0.5,0.5]", "encoder.std=[0.2,0.2,0.2]"]
    modules = build_modules(resolve_recipe("viewmaker:digits", settings))
    pictures_BCHW = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    keys = DrawKeys(0, 0, torch.arange(4), 4)
    encoder, policy = InBfloat16(modules.encoder), InBfloat16(modules.view_policy)
    with frozen(encoder, policy):
        assert not modules.encoder.training
        for ours, exact in (
            *zip(
                encoder.features_and_pooled(pictures_BCHW),
                modules.encoder.features_and_pooled(pictures_BCHW),
                strict=True,
            ),
            (policy(pictures_BCHW, keys, None), modules.view_policy(pictures_BCHW, keys, None)),
        ):
            assert ours.dtype == torch.float32
            difference = (ours - exact).norm() / exact.norm()
            assert 1e-5 < difference < 2e-2
