"""Measure how much augmentations bring the pictures of a class together: (sigma, delta) of Huang et al. (2023).

The distance of two pictures under augmentations is the distance of their nearest views. Augmentations are (sigma,
delta) if every class has a share sigma of its pictures within delta of one another. Such pictures form a clique in the
graph whose edges are distances up to delta. Richer augmentations have a larger sigma, and the paper bounds the error by
1 - sigma and further terms. The analysis measures sets of the paper's five transforms, by default all ten pairs: a
crop, b blur, c grayscale, d colour jitter, e flip.

The largest clique is found by branch and bound, which takes seconds for a hundred pictures. Finitely many views
overstate distances, so 1 - sigma holds for these views.

Shapes: K classes, N pictures of a class, V views of each, P values of a picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean
from typing import Annotated

import torch
from matplotlib.figure import Figure
from pydantic import AfterValidator, Field
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.progress import Progress
from data_pipeline.core.sample import NO_LABEL
from data_pipeline.core.schema import PositiveFactor, Schema, Share
from trainer.analyses.analysis import Analysis, LoadedRun
from trainer.observability.figures import to_png
from trainer.probes.features import Pictures
from trainer.views.colour import NUM_COLOURS
from trainer.views.expert_image import HUANG_LETTERS, ExpertImage, huang_views
from trainer.views.inputs import to_floating

PAIRS = tuple("".join(pair) for pair in combinations(HUANG_LETTERS, 2))
_BLOCK = 10  # pictures whose views are compared at once


def _checked(letters: str) -> str:
    huang_views(letters)
    return letters


class ConcentrationConfig(Schema):
    """The settings of the analysis of concentration."""

    num_per_class: Annotated[int, Field(ge=2, le=100)] = Field(50, description="The pictures of each class.")
    num_views: Annotated[int, Field(ge=2, le=10**6)] = Field(
        30, description="The views of each picture. The picture itself is the first."
    )
    deltas: Annotated[tuple[PositiveFactor, ...], Field(min_length=1, max_length=1_000)] = Field(
        (8.0, 9.0, 10.0, 12.0),
        description="The distances delta at which 1 - sigma is measured, for pixel values in [0, 1].",
    )
    transforms: Annotated[tuple[Annotated[str, AfterValidator(_checked)], ...], Field(min_length=1)] = Field(
        PAIRS, description="The sets of transforms, by their letters."
    )
    strengths: Annotated[tuple[Annotated[float, Field(gt=0, le=1.25)], ...], Field(min_length=1)] = Field(
        (0.5,), description="The strengths of the colour jitter. Sets with d are measured at each."
    )
    jitter_probability: Share = Field(0.8, description="The share of views that d changes.")


class Concentration(Schema):
    """One set of transforms at one delta: 1 - sigma, the mean over the classes and that of the worst class."""

    delta: float
    outside: float
    outside_worst: float


class ConcentrationResult(Schema):
    """analysis/concentration.json.

    sets: the results by the letters of a set, and by its strength if there are several ("ad 0.25"). Pictures that do
        not have three channels have no sets with c or d.
    order: for each delta the sets from the smallest 1 - sigma (mean of the classes) to the largest. Of the pairs,
        (a, d) comes first in the paper.
    num_classes: the classes that have pictures.
    """

    config: ConcentrationConfig
    seed: int
    num_classes: int
    num_pictures: int
    sets: dict[str, tuple[Concentration, ...]]
    order: tuple[tuple[str, ...], ...]
    test_manifest_sha256: str


def measure(loaded: LoadedRun, config: ConcentrationConfig) -> tuple[ConcentrationResult, bytes]:
    """Return the numbers and the figure from a run's test pictures alone, without a checkpoint.

    Raises `UserError` for sounds, and if a class has less than two pictures.
    """
    test, seed = loaded.read_test(pictures_for="concentration"), loaded.seed
    rows_KN = _rows_by_class(loaded, test, config.num_per_class)
    if not rows_KN.numel():
        raise UserError(
            "concentration needs two or more test pictures of each class of the first label, but "
            f"{loaded.config.data.test_dir} lacks them; build a larger one with a label, or index its tars with --label"
        )
    num_classes, num = rows_KN.shape
    images_KNCHW = to_floating(test.images(rows_KN).to(loaded.device))
    index_KN = test.samples.index_B[rows_KN].to(loaded.device)
    policies = _policies(config, num_channels=images_KNCHW.shape[2])
    sets: dict[str, tuple[Concentration, ...]] = {}
    with Progress("sets of transforms", total=len(policies) * num_classes) as progress:
        for name, policy in policies.items():
            distances = []
            for images_NCHW, index_N in zip(images_KNCHW, index_KN, strict=True):
                views_NVP = draw_views(policy, images_NCHW, index_N, num_views=config.num_views, seed=seed)
                distances.append(least_distances(views_NVP))
                progress.advance()
            distance_KNN = torch.stack(distances)
            sets[name] = tuple(_concentration(distance_KNN, delta) for delta in config.deltas)
    by_delta = [{name: sets[name][number].outside for name in sets} for number in range(len(config.deltas))]
    result = ConcentrationResult(
        config=config,
        seed=seed,
        num_classes=num_classes,
        num_pictures=num_classes * num,
        sets=sets,
        order=tuple(tuple(sorted(values, key=lambda name: values[name])) for values in by_delta),
        test_manifest_sha256=test.manifest.sha256,
    )
    return result, _figure(result)


ANALYSIS = Analysis("concentration", ConcentrationConfig, measure)


def _policies(config: ConcentrationConfig, *, num_channels: int) -> dict[str, ExpertImage]:
    """Return the policies by their names, without those that change colours if the pictures have no three channels."""
    policies = {}
    for letters in config.transforms:
        if num_channels != NUM_COLOURS and set(letters) & set("cd"):
            continue
        for strength in config.strengths if "d" in letters else config.strengths[:1]:
            name = f"{letters} {strength:g}" if "d" in letters and len(config.strengths) > 1 else letters
            views = huang_views(letters, strength=strength, jitter_probability=config.jitter_probability)
            policies[name] = ExpertImage(views)
    return policies


def draw_views(policy: ExpertImage, images_NCHW: Tensor, index_N: Tensor, *, num_views: int, seed: int) -> Tensor:
    """Return the pictures and `num_views - 1` views of each, as vectors (N, V, P) of values from -1/2 to 1/2."""
    views = [images_NCHW]
    views += [policy(images_NCHW, DrawKeys(seed, 0, index_N, view)) for view in range(num_views - 1)]
    return torch.stack([view_NCHW.flatten(1) for view_NCHW in views], dim=1) - 0.5  # centred, for precision


def least_distances(views_NVP: Tensor) -> Tensor:
    """Return the Euclidean distances (N, N) of the nearest views of every two pictures, 0 on the diagonal."""
    N, V, _ = views_NVP.shape
    square_NV = views_NVP.square().sum(2)
    least_NN = views_NVP.new_zeros(N, N)
    for first in range(0, N, _BLOCK):
        block = slice(first, first + _BLOCK)
        product = views_NVP[block].flatten(0, 1) @ views_NVP[first:].flatten(0, 1).T
        square = square_NV[block].flatten()[:, None] + square_NV[first:].flatten() - 2 * product
        least = square.view(-1, V, N - first, V).amin((1, 3)).clamp_min(0).sqrt()
        least_NN[block, first:] = least
        least_NN[first:, block] = least.T
    return least_NN.fill_diagonal_(0)


def largest_clique(near_NN: Tensor) -> int:
    """Return the most pictures that are all near one another, of a symmetric table (N, N) bool."""
    import networkx as nx  # here, because it is the only use

    graph = nx.from_numpy_array(near_NN.cpu().numpy())
    graph.remove_edges_from([(row, row) for row in graph])
    clique, _ = nx.max_weight_clique(graph, weight=None)
    return len(clique)


def _concentration(distance_KNN: Tensor, delta: float) -> Concentration:
    outside = [1 - largest_clique(near_NN) / len(near_NN) for near_NN in distance_KNN <= delta]
    return Concentration(delta=delta, outside=fmean(outside), outside_worst=max(outside))


def _rows_by_class(loaded: LoadedRun, pictures: Pictures, num: int) -> Tensor:
    """Return rows (K, N) of `num` pictures of each class of the first label; fewer if the smallest class has fewer.

    Leaves out classes without pictures: tars with the labels 1 to 10 name a class 0 too. Returns no row if a class has
    a single picture, or if there is no class.
    """
    labels = [pictures.by_label[space] for space in pictures.class_labels[:1]]
    classes = [
        (label_N, number) for label_N in labels for number in label_N[label_N != NO_LABEL].bincount().nonzero()[:, 0]
    ]
    by_class = [(label_N == number).nonzero()[:, 0] for label_N, number in classes]
    num = min([num, *map(len, by_class)])
    if num < 2 or not by_class:
        return torch.empty(0, 0, dtype=torch.int64)
    return torch.stack([rows_N[loaded.choose_rows(rows_N, num)] for rows_N in by_class])


def _figure(result: ConcentrationResult) -> bytes:
    """Draw 1 - sigma of every set, in the order of the middle delta; one colour for each delta."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    order: Sequence[str] = result.order[len(result.order) // 2]
    for number, delta in enumerate(result.config.deltas):
        outside = [result.sets[name][number].outside for name in order]
        places = [place + 0.14 * (number - (len(result.config.deltas) - 1) / 2) for place in range(len(order))]
        axes.plot(places, outside, "o", color=f"C{number}", markersize=6, label=f"{delta:g}")
    axes.set_xticks(range(len(order)), [name.replace(" ", "\n") for name in order])
    axes.set(ylabel="1 - sigma, mean of classes", ylim=(-0.02, 1.02))
    axes.set_xlabel("a crop, b blur, c grayscale, d colour jitter, e flip")
    axes.set_title("Share of a class outside its largest set that is all within delta", fontsize=10)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="delta", frameon=False, loc="lower right", ncols=len(result.config.deltas))
    return to_png(figure)
