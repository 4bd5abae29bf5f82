from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.neighbors import NearestCentroid
from torch.nn import functional as F

from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import drawn
from tests.tiny_data import write_tiny_pair
from tests.trainer.analyses.planted import DropBottom, plant, write_run
from trainer.analyses.alignment import (
    ANALYSIS,
    AlignmentConfig,
    AlignmentResult,
    alignment,
    class_centres,
    nearest_centre,
    share_apart,
)
from trainer.analyses.analysis import LoadedRun


def random_views(seed: int, *, num: int = 30, num_views: int = 4) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(num, num_views, 6, generator=draw, dtype=torch.float64), dim=2)


def test_alignment_and_r_are_means_over_pairs_of_views() -> None:
    u_NVD = random_views(0)
    distances = np.array(
        [[np.linalg.norm(a - b) for a, b in combinations(views.numpy(), 2)] for views in u_NVD], dtype=np.float64
    )
    assert alignment(u_NVD).item() == pytest.approx((distances**2).mean())
    for epsilon in (0.5, 1.0, 1.5, 1.9):
        assert share_apart(u_NVD, epsilon).item() == pytest.approx((distances.max(1) > epsilon).mean())


def test_nearest_centre_is_that_of_scikit_learn() -> None:
    u_NVD, label_N = random_views(1, num=60), torch.arange(60) % 4
    centres_KD = class_centres(u_NVD, label_N, num_classes=4)
    peer = NearestCentroid().fit(u_NVD.flatten(0, 1).numpy(), label_N.repeat_interleave(4).numpy())
    np.testing.assert_allclose(centres_KD.numpy(), peer.centroids_, atol=1e-12)
    queries_ND = random_views(2, num=200)[:, 0]
    np.testing.assert_array_equal(nearest_centre(centres_KD, queries_ND).numpy(), peer.predict(queries_ND.numpy()))


def test_planted_classes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two directions tell the base class; views that change nothing are aligned, and those that drop a half are not."""
    data = write_tiny_pair(tmp_path / "data", num_train=60, num_test=50)
    runs = [write_run(tmp_path / name, data) for name in ("keeps", "drops")]
    plant(monkeypatch, keeps=DropBottom(0.0), drops=DropBottom(0.5))
    results = []
    for run_dir in runs:
        _, json_path = ANALYSIS.analyze([LoadedRun(run_dir)], config=AlignmentConfig(num_views=3))
        results.append(AlignmentResult.parse(json.loads(json_path.read_text()), where=""))
        monkeypatch.setattr("trainer.analyses.alignment.to_png", lambda figure: b"")  # one figure is enough
    assert Image.open(runs[0].analysis / "alignment.png").size[0] > 1000
    keeps, drops = (result.spaces["pooled"] for result in results)
    assert results[0].num_test == 50
    assert keeps.alignment == pytest.approx(0, abs=1e-6)
    assert set(keeps.r_epsilon) == {0.0}
    apart, first_r, rank = drawn([drops.alignment, drops.r_epsilon[0], keeps.effective_rank])
    assert apart > 0.1
    assert first_r > 0.5
    assert 1 < rank <= keeps.num_dimensions == 2
    base = keeps.labels["base"]
    assert base.divergence is not None
    assert base.divergence == pytest.approx(base.centre_products[0][1])
    assert base.divergence < drops.labels["overlay"].divergence  # type: ignore[operator]
    assert keeps.labels["overlay"].class_names == ("low", "middle", "high")
    assert base.nearest_centre_accuracy is not None
    assert base.nearest_centre_accuracy > 0.8


def test_classes_in_another_order_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of their classes do not mean the same, so the nearest centre would be that of another class."""
    data = write_tiny_pair(tmp_path / "data", num_train=20, num_test=12)
    manifest = data / "test" / "manifest.json"
    facts = json.loads(manifest.read_text())
    facts["labels"]["base"]["classes"].reverse()
    manifest.write_text(json.dumps(facts))
    plant(monkeypatch, run=DropBottom(0.0))
    with pytest.raises(UserError, match="class 0 of label_base is dark in the train set but bright in the test set"):
        ANALYSIS.analyze([LoadedRun(write_run(tmp_path / "run", data))], config=AlignmentConfig())
