from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from configs import debug
from data_pipeline.core.counter_rng import DrawKeys
from tests.tiny_data import write_tiny_pair
from tests.trainer.analyses.planted import write_run
from trainer.analyses.analysis import LoadedRun
from trainer.analyses.collision import (
    ANALYSIS,
    SWITCHES,
    CollisionConfig,
    CollisionResult,
    alone,
    collide,
)
from trainer.views.expert_image import ExpertImageConfig


def test_a_transform_that_halves_distances_collides_after_two_uses() -> None:
    images_NCHW = torch.eye(4).view(4, 1, 2, 2)  # all equally far apart
    epochs: list[int] = []

    def halve(images_BCHW: Tensor, keys: DrawKeys, masks_BHW: Tensor | None) -> Tensor:
        epochs.append(keys.epoch)
        return (images_BCHW + 0.5) / 2

    found = collide(halve, images_NCHW, torch.arange(4), uses=(0, 1, 2, 4), near=0.26, seed=0)
    assert found.relative_distance == pytest.approx((1, 1 / 2, 1 / 4, 1 / 16))
    assert list(found.near_share) == [0, 0, 1, 1]
    assert found.uses_to_half == 1
    assert epochs == [1, 2, 3, 4]  # every use has draws of its own


@pytest.mark.parametrize("name", SWITCHES)
def test_alone_leaves_one_transform_on(name: str) -> None:
    config = ExpertImageConfig(area=(0.3, 0.9))
    single = alone(config, name)
    on = {switch for switch in SWITCHES.values() if getattr(single, switch)}
    assert on == {SWITCHES[name]}
    if name in ("brightness", "contrast"):
        assert [single.brightness > 0, single.contrast > 0] == [name == "brightness", name == "contrast"]
        assert single.saturation == single.hue == 0
    assert getattr(single, SWITCHES[name]) == getattr(config, SWITCHES[name])


@pytest.mark.slow
def test_blur_contracts_and_flips_do_not(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", write_tiny_pair(tmp_path / "data", num_train=4, num_test=40))
    png_path, json_path = ANALYSIS.analyze([LoadedRun(run_dir)], config=CollisionConfig(max_uses=4))
    result = CollisionResult.parse(json.loads(json_path.read_text()), where="")
    assert result.num_pictures == 40
    assert result.policy == debug.image().views
    assert list(result.transforms) == [*SWITCHES, "mask", "all"]
    for collision in result.transforms.values():
        assert collision.relative_distance[0] == pytest.approx(1)
    # A picture here is two plain halves with noise on them: blur takes the noise, and a flip keeps the halves.
    blur, flip = (result.transforms[name].relative_distance for name in ("blur", "flip"))
    assert all(later < earlier for earlier, later in pairwise(blur))
    assert min(flip) > 0.95
    mask = result.transforms["mask"].relative_distance  # after 1, 2 and 4 uses it keeps 1 / 2, 1 / 4, 1 / 16
    assert mask[3] / mask[2] == pytest.approx((1 / 4) ** 0.5, abs=0.05)
    assert Image.open(png_path).size[0] > 800
