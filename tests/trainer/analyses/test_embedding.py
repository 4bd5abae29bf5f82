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
from trainer.analyses.embedding import (
    ANALYSIS,
    EmbeddingConfig,
    EmbeddingResult,
    map_of,
    silhouette,
)


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


def test_planted_clusters_stay_clusters_in_the_map() -> None:
    label_N = np.arange(60) % 3
    x_NC = np.eye(3)[label_N] * 5 + 0.1 * np.random.default_rng(1).normal(size=(60, 3))
    seed = 2**63 - 1  # NumPy's legacy generator takes less than 2**32
    points_N2 = map_of(x_NC, perplexity=30, seed=seed)
    found = silhouette(points_N2, label_N)
    assert found is not None
    assert found > 0.7
    np.testing.assert_array_equal(map_of(x_NC, perplexity=30, seed=seed), points_N2)


def test_the_label_that_the_features_hold_is_told_from_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=8, num_test=80)
    plant(monkeypatch, run=DropBottom(0.0))
    run_dir = write_run(tmp_path / "run", data)
    png_path, json_path = ANALYSIS.analyze([LoadedRun(run_dir, given_seed=2)], config=EmbeddingConfig(num_samples=70))
    result = EmbeddingResult.parse(json.loads(json_path.read_text()), where="")
    assert (result.num_samples, result.seed) == (70, 2)
    base, overlay = result.silhouette["base"], result.silhouette["overlay"]
    assert base is not None
    assert overlay is not None
    assert max(base, overlay) > 0.2
    assert Image.open(png_path).size[0] > 1000


def test_features_that_are_all_equal_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """t-SNE ends the process on them with a segmentation fault, so that a test on the old code ends too."""
    monkeypatch.setattr("trainer.analyses.embedding.map_of", lambda *args, **kwargs: pytest.fail("t-SNE was called"))
    equal = {"pooled": torch.ones(8, 3)}
    monkeypatch.setattr("trainer.analyses.embedding.plain_vectors", lambda loaded, rows_N: equal)
    plant(monkeypatch, run=DropBottom(0.0))
    run_dir = write_run(tmp_path / "run", write_tiny_pair(tmp_path / "data", num_train=4, num_test=8))
    with pytest.raises(UserError, match=r"all 8 test samples of .* have the same features at step 0"):
        ANALYSIS.analyze([LoadedRun(run_dir)], config=EmbeddingConfig())
