"""Measure the features without labels: RankMe, LiDAR and the decay of the eigenspectrum (alpha-ReQ).

These numbers are used to choose between encoders if there are no labels. They see a collapse, when features fill few
dimensions. They do not see feature suppression: an easy feature, such as bits that are the same in both views, fills
many dimensions while another feature is lost. A probe for each label sees that.

Shapes: N samples, V views of each, D dimensions, R ranks of eigenvalues, from 1 for the largest.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from data_pipeline.core.schema import Count, Epsilon, Measured, Schema, drawn, shown
from trainer.analyses.analysis import SPACES, Analysis, LoadedRun, RunResult, Space, plain_vectors, view_vectors
from trainer.objectives.health import effective_rank
from trainer.observability.figures import to_png

_NOISE = 1e-12  # of the largest eigenvalue: smaller ones are rounding errors


class MonitorsConfig(Schema):
    """The settings of the monitors."""

    num_samples: Annotated[int, Field(ge=2, le=10**6)] = Field(1000, description="The test samples that are used.")
    num_views: Annotated[int, Field(ge=2, le=10**4)] = Field(10, description="The views of each sample, for LiDAR.")
    within_floor: Epsilon = Field(
        1e-4, description="What LiDAR adds to each variance between views of a sample, delta in the paper."
    )
    first_rank: Count = Field(4, description="The rank of the first eigenvalue in the fit of alpha.")
    last_rank: Count = Field(100, description="The rank of the last eigenvalue in the fit of alpha.")


class Monitors(Schema):
    """The monitors of one space. All are None if features are not finite.

    rank_me, lidar: numbers of dimensions, from 1 to `num_dimensions`.
    alpha: the exponent with which eigenvalues decay; None if fewer than two eigenvalues of the range are above 0.
    eigenvalues: of the covariance of samples without views, from the largest.
    """

    num_dimensions: int
    rank_me: Measured
    lidar: Measured
    alpha: Measured
    eigenvalues: tuple[Measured, ...]


class MonitorsResult(RunResult):
    """analysis/monitors.json."""

    config: MonitorsConfig
    num_samples: int
    spaces: dict[Space, Monitors]


def measure_run(loaded: LoadedRun, config: MonitorsConfig) -> tuple[MonitorsResult, bytes]:
    """Return the monitors of both spaces and the figure."""
    rows_N = loaded.choose_rows(loaded.test, config.num_samples)
    plain, views = plain_vectors(loaded, rows_N), view_vectors(loaded, loaded.test, rows_N, num_views=config.num_views)
    result = MonitorsResult(
        config=config,
        num_samples=len(rows_N),
        spaces={space: measure(plain[space], views[space], config) for space in SPACES},
        **loaded.facts,
    )
    return result, draw_figure(result)


ANALYSIS = Analysis("monitors", MonitorsConfig, measure_run)


def measure(x_ND: Tensor, views_NVD: Tensor, config: MonitorsConfig) -> Monitors:
    """Return the monitors of samples without views `x_ND` and of their views, computed in float64."""
    num_dimensions = x_ND.shape[1]
    if not (x_ND.isfinite().all() and views_NVD.isfinite().all()):
        return Monitors(num_dimensions=num_dimensions, rank_me=None, lidar=None, alpha=None, eigenvalues=())
    eigenvalue_R = eigenspectrum(x_ND.double())
    return Monitors(
        num_dimensions=num_dimensions,
        rank_me=effective_rank(x_ND.double()).item(),
        lidar=lidar(views_NVD.double(), within_floor=config.within_floor).item(),
        alpha=decay_exponent(eigenvalue_R, first_rank=config.first_rank, last_rank=config.last_rank),
        eigenvalues=tuple(eigenvalue_R.tolist()),
    )


def lidar(views_NVD: Tensor, *, within_floor: float) -> Tensor:
    """Return LiDAR, a scalar from 1 to D (Thilak et al. 2024, equations 1 to 4).

    It is exp(entropy) of the eigenvalues of W^-1/2 B W^-1/2, scaled to a sum of 1. B is the covariance of the means of
    the samples. W is the covariance of views around the mean of their sample, plus `within_floor` on its diagonal. The
    paper also adds a small number to each share, which is left out here. Pass float64.
    """
    mean_ND = views_NVD.mean(1)
    apart_ND = mean_ND - mean_ND.mean(0)
    within_XD = (views_NVD - mean_ND[:, None]).flatten(0, 1)
    variance_D, direction_DD = torch.linalg.eigh(within_XD.T @ within_XD / len(within_XD))
    # Scaled to the directions of W, so that no matrix is inverted: rounding errors below 0 count as 0.
    white_ND = apart_ND @ direction_DD / (variance_D.clamp_min(0) + within_floor).sqrt()
    eigenvalue_D = torch.linalg.svdvals(white_ND).square()
    share_D = eigenvalue_D / eigenvalue_D.sum().clamp_min(torch.finfo(eigenvalue_D.dtype).tiny)
    rank: Tensor = torch.special.entr(share_D).sum().exp()
    return rank


def eigenspectrum(x_ND: Tensor) -> Tensor:
    """Return the eigenvalues of the covariance of the rows, from the largest, without rounding errors of 0; (R,)."""
    apart_ND = x_ND - x_ND.mean(0)
    eigenvalue_R: Tensor = torch.linalg.svdvals(apart_ND).square() / len(x_ND)
    return eigenvalue_R[eigenvalue_R > _NOISE * eigenvalue_R[0]]


def decay_exponent(eigenvalue_R: Tensor, *, first_rank: int, last_rank: int) -> float | None:
    """Return alpha if eigenvalue r is proportional to r^-alpha (Agrawal et al. 2022); None for fewer than two of them.

    Fits a line to the logarithms of eigenvalues and ranks by least squares with the weight 1 / rank, as in the
    published code. Uses the ranks from `first_rank` to `last_rank` that exist; the published code takes 4 to 100.
    """
    log_E = eigenvalue_R[first_rank - 1 : last_rank].log().cpu().numpy()
    if len(log_E) < 2:
        return None
    rank_E = np.arange(first_rank, first_rank + len(log_E))
    return -float(np.polyfit(np.log(rank_E), log_E, 1, w=rank_E**-0.5)[0])  # it squares the weights


def draw_figure(result: MonitorsResult) -> bytes:
    """Draw the eigenspectra and the monitors of both spaces, as PNG."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for (space, found), color in zip(result.spaces.items(), ("C0", "C2"), strict=True):
        title = f"{space}: RankMe {shown(found.rank_me, '.1f')}, LiDAR {shown(found.lidar, '.1f')}"
        title += f" of {found.num_dimensions}, alpha {shown(found.alpha, '.2f')}"
        eigenvalues = drawn(found.eigenvalues)
        axes.plot(np.arange(1, len(eigenvalues) + 1), eigenvalues, marker=".", color=color, label=title)
    axes.set(xlabel="rank", ylabel="eigenvalue of the covariance")
    if any(found.eigenvalues for found in result.spaces.values()):  # an empty axis has no logarithm
        axes.set(xscale="log", yscale="log")
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return to_png(figure)
