from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data_pipeline.core.errors import UserError
from tests.tiny_data import write_tiny_pair
from tests.trainer.analyses.planted import DropBottom, plant, write_run
from trainer.analyses.analysis import LoadedRun
from trainer.analyses.filters import silhouette
from trainer.analyses.tsne import ANALYSIS, TSNEConfig, map_of


def test_planted_clusters_stay_clusters_in_the_map() -> None:
    label_N = np.arange(60) % 3
    x_NC = np.eye(6)[3 + label_N] * 5 + 0.1 * np.random.default_rng(1).normal(size=(60, 6))
    seed = 2**63 - 1  # NumPy's older generator takes less than 2**32
    points_N2 = map_of(x_NC, perplexity=30, seed=seed)
    found = silhouette(points_N2.astype(np.float64), label_N)
    assert found is not None
    assert found > 0.7
    np.testing.assert_array_equal(map_of(x_NC, perplexity=30, seed=seed), points_N2)


def test_a_run_has_a_map_for_each_label_in_the_colours_of_its_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, run=DropBottom(0.0))
    run_dir = write_run(tmp_path / "run", write_tiny_pair(tmp_path / "data", num_train=8, num_test=80))
    png_path, json_path = ANALYSIS.analyze([LoadedRun(run_dir)], config=TSNEConfig(num_samples=70))
    pixels = np.asarray(Image.open(png_path).convert("RGB"))
    for panel in np.split(pixels, [pixels.shape[1] // 2], axis=1):
        assert {tuple(pixel) for pixel in panel.reshape(-1, 3)} >= {(31, 119, 180), (255, 127, 14)}
    scores = json.loads(json_path.read_text())["silhouette"]
    assert max(scores["base"], scores["overlay"]) > 0.2


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_features_that_are_all_equal_or_not_finite_are_refused(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """t-SNE ends the process on equal ones with a segmentation fault, so a test without the check would end too."""
    monkeypatch.setattr("trainer.analyses.tsne.map_of", lambda *args, **kwargs: pytest.fail("t-SNE was called"))
    features = {"pooled": torch.full((8, 3), value)}
    monkeypatch.setattr("trainer.analyses.tsne.plain_vectors", lambda loaded, rows_N: features)
    plant(monkeypatch, run=DropBottom(0.0))
    run_dir = write_run(tmp_path / "run", write_tiny_pair(tmp_path / "data", num_train=4, num_test=8))
    with pytest.raises(UserError, match=r"features of .* at step 0 are not finite or all equal"):
        ANALYSIS.analyze([LoadedRun(run_dir)], config=TSNEConfig())
