from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score
from torch import Tensor

from configs import debug
from data_pipeline.core.schema import drawn
from tests.tiny_data import write_tiny_pair
from tests.trainer.analyses.planted import write_run
from trainer.analyses.analysis import LoadedRun
from trainer.analyses.filters import ANALYSIS, FiltersConfig, FiltersResult, explained_share, silhouette, sparsity_of
from trainer.modules import build_modules
from trainer.observability.figures import GAP, LEFT, TOP
from trainer.probes.features import read_pictures

CONFIG = FiltersConfig(num_shown=10)


def test_silhouette_is_rousseeuws() -> None:
    draw = np.random.default_rng(0)
    x_NC, label_N = draw.normal(size=(20, 3)), np.arange(20) % 3
    scores = []
    for row in range(20):
        distance_N = np.linalg.norm(x_NC - x_NC[row], axis=1)
        own = distance_N[(label_N == label_N[row]) & (np.arange(20) != row)].mean()
        other = min(distance_N[label_N == label].mean() for label in range(3) if label != label_N[row])
        scores.append((other - own) / max(own, other))
    assert silhouette(x_NC, label_N) == pytest.approx(np.mean(scores))
    assert silhouette(x_NC, np.zeros(20, dtype=np.int64)) is None
    assert silhouette(x_NC, np.arange(20)) is None


def test_sparsity_of_known_maps() -> None:
    """Maps with a single active value, with equal values, with half of them equal, and with none; below 0 is silent."""
    maps_BCHW = torch.full((4, 4, 2, 2), -1.0)
    maps_BCHW[0, 1, 0, 1] = 3.0
    maps_BCHW[1] = 0.7
    maps_BCHW[2, :2] = 0.7
    found = sparsity_of(maps_BCHW)
    torch.testing.assert_close(found["active_share"], torch.tensor([1 / 16, 1, 1 / 2, 0]).double())
    torch.testing.assert_close(found["treves_rolls"], torch.tensor([15 / 16, 0, 1 / 2, 0]).double(), atol=1e-7, rtol=0)
    expected = torch.tensor([1, 0, (4 - 8**0.5) / 3, 0]).double()
    torch.testing.assert_close(found["hoyer"], expected, atol=1e-6, rtol=0)
    assert found["fires"].tolist() == [[False, True, False, False], [True] * 4, [True, True, False, False], [False] * 4]


def test_explained_share_is_that_of_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    x_NP, noise_NC = draw.normal(size=(80, 3)), draw.normal(size=(80, 5))
    y_NC = x_NP @ draw.normal(size=(3, 5)) + 4 + noise_NC
    expected = r2_score(y_NC, LinearRegression().fit(x_NP, y_NC).predict(x_NP), multioutput="variance_weighted")
    assert explained_share(torch.from_numpy(x_NP), torch.from_numpy(y_NC)) == pytest.approx(expected)
    twice = torch.from_numpy(np.hstack([x_NP, x_NP[:, :1]]))  # a column that depends on another
    assert explained_share(twice, torch.from_numpy(y_NC)) == pytest.approx(expected)
    assert explained_share(torch.from_numpy(x_NP), torch.from_numpy(y_NC - noise_NC)) == pytest.approx(1)
    assert explained_share(torch.from_numpy(x_NP), torch.ones(80, 2).double()) == 0


def test_numbers_of_a_real_encoder(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", write_tiny_pair(tmp_path / "data", num_train=4, num_test=40))
    png_path, json_path = ANALYSIS.analyze([LoadedRun(run_dir, step=0)], config=CONFIG)
    result = FiltersResult.parse(json.loads(json_path.read_text()), where="")
    assert (result.num_pictures, result.num_channels) == (40, 32)
    assert len(set(result.shown)) == 10
    active, hoyer, dead, r2 = drawn(
        [result.sparsity.active_share, result.sparsity.hoyer, result.sparsity.dead_share, result.colour_r2]
    )
    assert 0 < active < 1
    assert 0 < hoyer < 1
    assert 0 <= dead < 1
    assert 0 < r2 < 1
    assert Image.open(png_path).size[0] > 1000
    test = read_pictures(run_dir.path.parent / "data" / "test")
    images_NCHW = test.images(torch.arange(len(test)))
    with torch.no_grad():
        pooled_NC = build_modules(debug.image()).encoder.eval().pooled(images_NCHW / 255)
    check_first_row(png_path, images_NCHW, pooled_NC, result.shown[0])
    colour_N3 = images_NCHW.double().mean((2, 3)).numpy()
    brightness_N1 = colour_N3 @ [[0.299], [0.587], [0.114]]
    of_colour, of_brightness = (
        r2_score(pooled_NC, LinearRegression().fit(x, pooled_NC).predict(x), multioutput="variance_weighted")
        for x in (colour_N3, brightness_N1)
    )
    assert r2 == pytest.approx(of_colour, abs=1e-4)
    assert result.chroma_r2 == pytest.approx(of_colour - of_brightness, abs=1e-4)
    assert 0.01 < of_brightness < of_colour - 0.01


def check_first_row(png_path: Path, images_NCHW: Tensor, pooled_NC: Tensor, channel: int) -> None:
    """Check that the first row of the figure shows the pictures on which a channel is highest."""
    pixels = torch.from_numpy(np.asarray(Image.open(png_path).convert("RGB")).copy())
    scale = 128 // 16
    for column, row in enumerate(pooled_NC[:, channel].argsort(descending=True)[:8].tolist()):
        left = LEFT + column * (128 + GAP)
        shown_CHW = pixels[TOP : TOP + 128 : scale, left : left + 128 : scale].permute(2, 0, 1)
        torch.testing.assert_close(shown_CHW, images_NCHW[row], atol=1, rtol=0)
