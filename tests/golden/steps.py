"""The loss and the gradients of one training step in float64, for each kind of views."""

from __future__ import annotations

import numpy as np
import torch

from configs import resolve_recipe
from data_pipeline.core.batch import Batch
from tests.golden.digests import Numbers, digest
from tests.small_encoder import CONVNET
from tests.tiny_data import NUM_POINTS
from tests.trainer.test_exactness import BATCH_SIZE, one_step, own_part

MODULES = ("encoder", "viewmaker", "objective")
ALTERNATING = ["adversary.update=alternating", "adversary.viewmaker_steps=2"]
MASK, CHANNELS = "{kind: random_mask}", "{kind: channel_dropout}"
SMALL = "{kind: viewmaker, base_width: 4, num_res_blocks: 1}"

# Recipe and settings. Steps of sounds have a ResNet; those of pictures the small convnet, unless they say otherwise.
CASES = {
    "expert_image": ("debug:image", [CONVNET]),
    "expert_image, resnet, in micro batches": ("debug:image", ["memory.micro_batches=2"]),
    "random_mask": ("debug:image", [CONVNET, f"views={MASK}"]),
    "channel_dropout": ("debug:image", [CONVNET, f"views={CHANNELS}"]),
    "sequence": ("debug:image", [CONVNET, f"views={{kind: sequence, parts: [{{kind: expert_image}}, {MASK}]}}"]),
    "pair": ("debug:image", [CONVNET, f"views={{kind: pair, first: {{kind: expert_image}}, second: {CHANNELS}}}"]),
    "multi_crop": (
        "debug:image",
        ["views={kind: multi_crop, num_local: 3, local_size: 8}", "objective={kind: dino, num_prototypes: 12}"],
    ),
    "viewmaker": ("debug:viewmaker", [CONVNET]),
    "viewmaker, resnet": ("debug:viewmaker", ["adversary.weight=0.5"]),
    "viewmaker, alternating": ("debug:viewmaker", [CONVNET, *ALTERNATING]),
    "viewmaker with dropout": ("debug:viewmaker", [CONVNET, "views.dropout_rate=0.1"]),
    "viewmaker in a pair": (
        "debug:viewmaker",
        [CONVNET, f"views={{kind: pair, first: {SMALL}, second: {{kind: expert_image}}}}"],
    ),
    "spectral": ("debug:audio", []),
    "waveform": ("debug:audio", ["views.kind=waveform"]),
    "viewmaker of sounds": ("debug:audio_viewmaker", ["views.downsample_to=16"]),
}


def one_case(case: str) -> Numbers:
    """Return the loss, and for each module a digest of all its gradients with the norm of each of them."""
    recipe, overrides = CASES[case]
    config = resolve_recipe(recipe, [*overrides, "precision=float64", f"global_batch_size={BATCH_SIZE}"])
    found = one_step(config, batch=own_part() if config.data.mel is None else _sounds())
    numbers = {"loss": [found["loss"].item()]}
    for module in MODULES:
        names = [name for name in sorted(found) if name.startswith(f"{module}/") and found[name].is_floating_point()]
        if names:
            whole = torch.cat([found[name].double().flatten() for name in names])
            numbers[module] = [*digest(whole), *(found[name].double().norm().item() for name in names)]
    return numbers


def _sounds() -> Batch:
    draw = np.random.default_rng(1)
    tones_BT = np.sin(np.arange(NUM_POINTS) * draw.uniform(0.2, 1, size=(BATCH_SIZE, 1)))
    hiss_VBT = 0.1 * draw.standard_normal((2, BATCH_SIZE, NUM_POINTS))
    first_BT, second_BT = (torch.tensor(0.5 * tones_BT + hiss_BT, dtype=torch.float32) for hiss_BT in hiss_VBT)
    return Batch(3, 1, torch.arange(BATCH_SIZE), first_BT, second_BT, None, None, {})
