"""Measure if views of a sample stay together and classes apart (Wang and Isola 2020; Huang et al. 2023).

All quantities are of unit vectors: the embeddings that the objective compares, and the pooled features below the head.
Class centres are means over views of train samples. Everything else is measured on test samples.

Shapes: N samples, V views of each, D dimensions, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.core.sample import NO_LABEL
from data_pipeline.core.schema import Measured, PositiveFactor, Schema, drawn, shown
from trainer.analyses.analysis import SPACES, Analysis, LoadedRun, RunResult, Space, plain_vectors, view_vectors
from trainer.objectives.health import effective_rank, uniformity
from trainer.observability.figures import to_png
from trainer.probes.features import LabelSpace
from trainer.probes.linear import accuracy, best_classes
from trainer.probes.targets import check_same_classes


class AlignmentConfig(Schema):
    """The settings of the analysis of alignment."""

    num_samples: Annotated[int, Field(ge=2, le=10**6)] = Field(
        1000, description="The samples of the train set and of the test set that are used."
    )
    num_views: Annotated[int, Field(ge=2, le=10**6)] = Field(4, description="The views of each sample.")
    epsilons: Annotated[tuple[PositiveFactor, ...], Field(min_length=1, max_length=1_000)] = Field(
        (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4),
        description="The distances of two views at which R(epsilon) is counted.",
    )


class ClassCentres(Schema):
    """The centres of a label's classes.

    divergence: the largest inner product of two centres; None for a single class.
    centre_norm: the smallest length of a centre.
    nearest_centre_accuracy: the accuracy on test samples without views if each gets the class of the nearest centre.
    """

    divergence: Measured
    centre_norm: Measured
    nearest_centre_accuracy: Measured
    class_names: tuple[str, ...]
    centre_products: tuple[tuple[Measured, ...], ...]


class SpaceResult(Schema):
    """The quantities in one space.

    alignment: the mean squared distance of two views of a sample: 0 if they coincide, 2 for independent directions.
    uniformity, effective_rank: as in the training log, over one view of each sample.
    r_epsilon: for each epsilon of the config, the share of samples with two views farther apart than that.

    All are None if features are not finite.
    """

    alignment: Measured
    uniformity: Measured
    effective_rank: Measured
    num_dimensions: int
    r_epsilon: tuple[Measured, ...]
    labels: dict[LabelSpace, ClassCentres]


class AlignmentResult(RunResult):
    """analysis/alignment.json."""

    config: AlignmentConfig
    num_train: int
    num_test: int
    spaces: dict[Space, SpaceResult]
    train_manifest_sha256: str


def measure(loaded: LoadedRun, config: AlignmentConfig) -> tuple[AlignmentResult, bytes]:
    """Return the numbers and the figure. Raises `UserError` if train and test set have different classes."""
    check_same_classes(loaded.train.manifest, loaded.test.manifest)
    rows = [loaded.choose_rows(part, config.num_samples) for part in (loaded.train, loaded.test)]
    train_views, test_views = (
        _unit(view_vectors(loaded, part, rows_N, num_views=config.num_views))
        for part, rows_N in zip((loaded.train, loaded.test), rows, strict=True)
    )
    plain = _unit(plain_vectors(loaded, rows[1]))
    spaces = {}
    for space in SPACES:
        u_NVD = test_views[space].double()
        spaces[space] = SpaceResult(
            alignment=alignment(u_NVD).item(),
            uniformity=uniformity(u_NVD[:, 0]).item(),
            effective_rank=effective_rank(u_NVD[:, 0]).item(),
            num_dimensions=u_NVD.shape[2],
            r_epsilon=tuple(share_apart(u_NVD, epsilon).item() for epsilon in config.epsilons),
            labels={
                label: _class_centres(
                    train_views[space].double(),
                    loaded.train.by_label[label][rows[0]].to(loaded.device),
                    plain[space].double(),
                    loaded.test.by_label[label][rows[1]].to(loaded.device),
                    class_names=loaded.train.class_names(label),
                )
                for label in loaded.test.class_labels
                if (loaded.train.by_label[label][rows[0]] != NO_LABEL).any()
                and (loaded.test.by_label[label][rows[1]] != NO_LABEL).any()
            },
        )
    result = AlignmentResult(
        config=config,
        num_train=len(rows[0]),
        num_test=len(rows[1]),
        spaces=spaces,
        train_manifest_sha256=loaded.train.manifest.sha256,
        **loaded.facts,
    )
    return result, _figure(result, test_views["embedding"].cpu())


ANALYSIS = Analysis("alignment", AlignmentConfig, measure)


def alignment(u_NVD: Tensor) -> Tensor:
    """Return the mean of |f1 - f2|^2 over samples and pairs of their views (Wang and Isola 2020), a scalar."""
    V = u_NVD.shape[1]
    # Over all pairs of V unit vectors, the squared distances add up to V * (sum of squares) - |sum|^2.
    total_N = V * u_NVD.square().sum((1, 2)) - u_NVD.sum(1).square().sum(1)
    return (total_N / (V * (V - 1) / 2)).mean()


def share_apart(u_NVD: Tensor, epsilon: float) -> Tensor:
    """Return R_epsilon of Huang et al. (2023): share of samples with two views more than `epsilon` apart, a scalar.

    nan if a vector is not finite.
    """
    farthest_N = torch.cdist(u_NVD, u_NVD).amax((1, 2))
    return torch.where(farthest_N.isfinite().all(), (farthest_N > epsilon).double().mean(), torch.nan)


def class_centres(u_NVD: Tensor, label_N: Tensor, *, num_classes: int) -> Tensor:
    """Return the mean over samples and views of each class, (K, D); zeros for a class without samples."""
    one_hot_NK = F.one_hot(label_N, num_classes).to(u_NVD.dtype)
    return one_hot_NK.T @ u_NVD.mean(1) / one_hot_NK.sum(0).clamp_min(1)[:, None]


def nearest_centre(centres_KD: Tensor, u_ND: Tensor) -> Tensor:
    """Classify as Huang et al. (2023) do, (N,) int64: argmin |u - centre|, which is linear in u.

    A class is negative if vectors are not finite, see `best_classes`.
    """
    return best_classes(u_ND @ centres_KD.T - centres_KD.square().sum(1) / 2)


def _class_centres(
    train_NVD: Tensor, train_label_N: Tensor, test_ND: Tensor, test_label_N: Tensor, *, class_names: tuple[str, ...]
) -> ClassCentres:
    """Measure the centres of classes with train samples; test samples of other classes count as wrong.

    Samples without the label are left out.
    """
    in_train_N, in_test_N = train_label_N != NO_LABEL, test_label_N != NO_LABEL
    train_NVD, train_label_N = train_NVD[in_train_N], train_label_N[in_train_N]
    test_ND, test_label_N = test_ND[in_test_N], test_label_N[in_test_N]
    centres_KD = class_centres(train_NVD, train_label_N, num_classes=len(class_names))
    present_P = torch.bincount(train_label_N, minlength=len(class_names)).nonzero()[:, 0]
    centres_PD = centres_KD[present_P]
    place_N = nearest_centre(centres_PD, test_ND)
    predicted_N = torch.where(place_N < 0, place_N, present_P[place_N.clamp_min(0)])
    products_PP = centres_PD @ centres_PD.T
    others_PP = products_PP.masked_fill(torch.eye(len(present_P), dtype=torch.bool, device=products_PP.device), -2)
    return ClassCentres(
        divergence=others_PP.max().item() if len(present_P) > 1 else None,
        centre_norm=centres_PD.norm(dim=1).min().item(),
        nearest_centre_accuracy=accuracy(predicted_N, test_label_N),
        class_names=tuple(class_names[number] for number in present_P.tolist()),
        centre_products=tuple(map(tuple, products_PP.tolist())),
    )


def _unit(vectors: Mapping[Space, Tensor]) -> dict[Space, Tensor]:
    return {space: F.normalize(x, dim=-1) for space, x in vectors.items()}


def _figure(result: AlignmentResult, u_NVD: Tensor) -> bytes:
    """Draw distances within and between samples, R over epsilon, and inner products of the class centres."""
    embedding = result.spaces["embedding"]
    figure = Figure(figsize=(13, 3.9), layout="constrained")
    within, curve, heat = figure.subplots(1, 3, width_ratios=(1.2, 1, 1.1))
    bins = np.linspace(0, 2, 41)
    same = (u_NVD[:, 0] - u_NVD[:, 1]).norm(dim=1).numpy()
    different = torch.pdist(u_NVD[:, 0]).numpy()
    for distances, color, title in ((same, "C0", "two views of a sample"), (different, "C1", "two samples")):
        shares, _ = np.histogram(distances, bins=bins)
        within.stairs(shares / max(1, shares.sum()), bins, fill=True, alpha=0.6, color=color, label=title)
    within.set(xlabel="distance of unit embeddings", ylabel="share of pairs")
    within.set_title(
        f"alignment {shown(embedding.alignment, '.3f')}, uniformity {shown(embedding.uniformity, '.2f')}", fontsize=10
    )
    within.legend(frameon=False, fontsize=9)
    for space, color in zip(SPACES, ("C0", "C2"), strict=True):
        values = drawn(result.spaces[space].r_epsilon)
        curve.plot(result.config.epsilons, values, marker="o", markersize=4, color=color, label=space)
    curve.set(xlabel="epsilon", ylabel="share of samples", ylim=(-0.03, 1.03))
    curve.set_title("R: two views further apart than epsilon", fontsize=10)
    curve.legend(frameon=False, fontsize=9)
    for axes in (within, curve):
        axes.spines[["top", "right"]].set_visible(False)
    if not embedding.labels:
        heat.set_axis_off()
        heat.set_title("no labels, so no class centres", fontsize=10)
        return to_png(figure)
    label, centres = list(embedding.labels.items())[-1]
    image = heat.imshow(
        np.asarray([drawn(products) for products in centres.centre_products]), vmin=-1, vmax=1, cmap="RdBu_r"
    )
    ticks = range(len(centres.class_names))
    heat.set_xticks(ticks, centres.class_names, rotation=90, fontsize=8)
    heat.set_yticks(ticks, centres.class_names, fontsize=8)
    right = shown(centres.nearest_centre_accuracy, ".1%")
    heat.set_title(f"centres of label_{label}: inner products\nnearest centre right: {right}", fontsize=10)
    figure.colorbar(image, ax=heat, shrink=0.85)
    return to_png(figure)
