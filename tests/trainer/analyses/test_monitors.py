"""RankMe, LiDAR and the decay of the eigenspectrum: against their formulas in NumPy, and planted truths."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.tiny_data import write_tiny_pair
from tests.trainer.analyses.planted import DropBottom, plant, write_run
from trainer.analyses.analysis import LoadedRun
from trainer.analyses.monitors import (
    ANALYSIS,
    MonitorsConfig,
    MonitorsResult,
    decay_exponent,
    eigenspectrum,
    lidar,
    measure,
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lidar_by_loop(views_NVD: Tensor, delta: float) -> float:
    """The equations of Thilak et al. with a matrix square root, sample by sample; the added epsilon is 1e-12."""
    views = views_NVD.numpy()
    num_samples, num_views, size = views.shape
    means = views.mean(1)
    between, within = np.zeros((size, size)), delta * np.eye(size)
    for sample in range(num_samples):
        apart = means[sample] - means.mean(0)
        between += np.outer(apart, apart) / num_samples
        for view in range(num_views):
            change = views[sample, view] - means[sample]
            within += np.outer(change, change) / (num_samples * num_views)
    value_D, vector_DD = np.linalg.eigh(within)
    root = vector_DD @ np.diag(value_D**-0.5) @ vector_DD.T
    share = np.abs(np.linalg.eigvalsh(root @ between @ root))
    share = share / share.sum() + 1e-12
    return float(np.exp(-(share * np.log(share)).sum()))


@pytest.mark.parametrize("delta", [1e-4, 1.0])
@pytest.mark.parametrize("num_samples", [5, 60])  # fewer samples than dimensions, and more
def test_lidar_is_the_papers_formula(num_samples: int, delta: float) -> None:
    views_NVD = draw(num_samples, 1, 8) * torch.arange(1, 9) + 0.3 * draw(num_samples, 4, 8, seed=1)
    assert lidar(views_NVD, within_floor=delta).item() == pytest.approx(lidar_by_loop(views_NVD, delta), rel=1e-6)


def test_lidar_counts_the_directions_in_which_samples_differ() -> None:
    """Samples differ equally in k of 12 directions, and views differ equally in all: LiDAR is k."""
    for k in (1, 3, 7):
        corners_ND = torch.eye(12, dtype=torch.float64)[:k].repeat(400, 1) * torch.sign(draw(400 * k, 1))
        views_NVD = corners_ND[:, None] + 1e-3 * draw(400 * k, 6, 12, seed=2)
        assert lidar(views_NVD, within_floor=1e-8).item() == pytest.approx(k, rel=0.02)
    collapsed = torch.ones(9, 3, 5, dtype=torch.float64)
    assert lidar(collapsed, within_floor=1e-4).item() == pytest.approx(1)


def test_noise_that_views_add_does_not_count_for_lidar_but_for_rank_me() -> None:
    """A direction in which views differ as much as samples is worth little."""
    signal, noise = draw(500, 1, 2), draw(500, 8, 6, seed=1)
    views_NVD = torch.cat([signal.expand(-1, 8, -1) + 0.01 * draw(500, 8, 2, seed=3), noise], dim=2)
    found = measure(views_NVD[:, 0], views_NVD, MonitorsConfig())
    assert found.lidar is not None
    assert found.rank_me is not None
    assert found.lidar < 2.1
    assert found.rank_me > 7


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.5])
def test_the_exponent_of_a_power_law_is_found(alpha: float) -> None:
    eigenvalue_R = 3.0 * torch.arange(1, 201, dtype=torch.float64) ** -alpha
    assert decay_exponent(eigenvalue_R, first_rank=4, last_rank=100) == pytest.approx(alpha, rel=1e-12)
    assert decay_exponent(eigenvalue_R[:20], first_rank=4, last_rank=100) == pytest.approx(alpha, rel=1e-12)
    assert decay_exponent(eigenvalue_R[:4], first_rank=4, last_rank=100) is None


def test_the_fit_is_weighted_least_squares() -> None:
    eigenvalue_R = torch.arange(1, 61, dtype=torch.float64) ** -1.3 * (1 + 0.3 * draw(60).abs())
    rank = np.arange(5, 41)
    design = np.stack([np.ones(len(rank)), -np.log(rank)], axis=1)
    root = np.sqrt(1 / rank)
    solved, *_ = np.linalg.lstsq(design * root[:, None], np.log(eigenvalue_R.numpy()[4:40]) * root, rcond=None)
    assert decay_exponent(eigenvalue_R, first_rank=5, last_rank=40) == pytest.approx(solved[1], rel=1e-10)


def test_the_eigenspectrum_is_that_of_the_covariance_without_rounding_errors() -> None:
    x_ND = draw(50, 4) @ draw(4, 9, seed=1) + 5
    expected = np.sort(np.linalg.eigvalsh(np.cov(x_ND.numpy().T, bias=True)))[::-1][:4]
    np.testing.assert_allclose(eigenspectrum(x_ND).numpy(), expected, rtol=1e-9)
    assert len(eigenspectrum(torch.ones(5, 3, dtype=torch.float64))) == 0


def test_rank_me_is_the_papers_formula() -> None:
    x_ND = draw(40, 7) * torch.arange(1, 8)
    share = np.linalg.svd(x_ND.numpy(), compute_uv=False)
    share = share / share.sum() + 1e-7
    found = measure(x_ND, x_ND[:, None].expand(-1, 2, -1), MonitorsConfig())
    assert found.rank_me == pytest.approx(float(np.exp(-(share * np.log(share)).sum())), rel=1e-4)


def test_a_run_is_measured_in_both_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=8, num_test=40)
    plant(monkeypatch, run=DropBottom(0.5))
    run_dir = write_run(tmp_path / "run", data)
    config = MonitorsConfig(num_samples=30, num_views=4, first_rank=1, last_rank=2)
    png_path, json_path = ANALYSIS.analyze([LoadedRun(run_dir, given_seed=2)], config=config)
    result = MonitorsResult.parse(json.loads(json_path.read_text()), where="")
    assert (result.num_samples, result.seed) == (30, 2)
    assert result.spaces["embedding"] == result.spaces["pooled"]  # the head of the planted encoder changes nothing
    pooled = result.spaces["pooled"]
    assert pooled.num_dimensions == 2
    for rank in (pooled.rank_me, pooled.lidar):
        assert rank is not None
        assert 1 <= rank <= 2
    assert pooled.alpha is not None
    assert Image.open(png_path).size[0] > 300
