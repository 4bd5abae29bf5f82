"""The views that each policy makes of a fixed batch, as functions of seed, epoch, sample and view."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs import resolve_recipe
from data_pipeline.core.counter_rng import DrawKeys
from tests.golden.digests import Numbers, digest
from tests.tiny_data import NUM_POINTS
from trainer.views import build_view_policy

NUM_SAMPLES, SIZE = 4, 32
SEQUENCE = "{kind: sequence, parts: [{kind: expert_image}, {kind: viewmaker, base_width: 4}]}"
BY_EPOCH = "{kind: by_epoch, policies: [{kind: expert_image}, {kind: channel_dropout}]}"

CASES = {
    "expert_image": ("debug:image", "{kind: expert_image}"),
    "random_mask": ("debug:image", "{kind: random_mask}"),
    "channel_dropout": ("debug:image", "{kind: channel_dropout}"),
    "viewmaker": ("debug:viewmaker", "{kind: viewmaker, base_width: 4, num_res_blocks: 1}"),
    "adversarial_mask": ("debug:viewmaker", "{kind: adversarial_mask}"),
    "sequence": ("debug:viewmaker", SEQUENCE),
    "pair": ("debug:image", "{kind: pair, first: {kind: expert_image}, second: {kind: random_mask}}"),
    "by_epoch": ("debug:image", BY_EPOCH),
    "multi_crop": ("debug:image", "{kind: multi_crop, num_local: 3, local_size: 16}"),
    "spectral": ("debug:audio", "{kind: spectral}"),
    "waveform": ("debug:audio", "{kind: waveform}"),
}


def one_case(case: str) -> Numbers:
    """Return a digest of the views of several seeds, epochs and numbers of views."""
    recipe, views = CASES[case]
    further = ["objective={kind: dino, num_prototypes: 12}"] if case == "multi_crop" else []
    config = resolve_recipe(recipe, [f"views={views}", *further])
    mel = config.data.mel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy: Any = build_view_policy(config.views, image_channels=config.encoder.in_channels, mel=mel)
    inputs = _pictures() if mel is None else _sounds()
    index_B = torch.tensor([7, 3, 11, 2_000_000])
    found: Numbers = {}
    for seed, epoch, view in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (5, 2, 3)):
        keys = DrawKeys(seed=seed, epoch=epoch, index_B=index_B, view=view)
        with torch.no_grad():
            found[f"seed {seed}, epoch {epoch}, view {view}"] = digest(policy(inputs, keys))
            if case == "multi_crop":
                found[f"seed {seed}, epoch {epoch}, local view {view}"] = digest(policy.further_view(inputs, keys))
    return found


def _pictures() -> Tensor:
    """Return smooth pictures in [0, 1], whose colours differ."""
    draw = np.random.default_rng(2)
    rows, columns = np.meshgrid(np.linspace(0, 1, SIZE), np.linspace(0, 1, SIZE), indexing="ij")
    slopes = draw.uniform(1, 9, size=(2, NUM_SAMPLES, 3, 1, 1))
    return torch.tensor(0.5 + 0.5 * np.sin(slopes[0] * rows + slopes[1] * columns), dtype=torch.float32)


def _sounds() -> Tensor:
    draw = np.random.default_rng(3)
    tones = np.sin(np.arange(NUM_POINTS) * draw.uniform(0.2, 1, size=(NUM_SAMPLES, 1)))
    return torch.tensor(0.5 * tones + 0.05 * draw.standard_normal(tones.shape), dtype=torch.float32)
