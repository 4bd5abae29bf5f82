"""Measure the sparsity of features and their dependence on colour: figures 1 to 4 of Wen and Li (2021), in numbers.

The paper finds that with augmentations that hide colour few features fire on a picture. Features then see shapes, and
pictures of a class lie together. Without such augmentations features fire densely and follow the colour of the whole
picture. The figure shows the test pictures that drive some features most.

Shapes: N pictures, B batch, C channels of the trunk's last map, H by W its pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from sklearn.metrics import silhouette_score
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import NO_LABEL
from data_pipeline.core.schema import Count, Measured, Schema
from trainer.analyses.analysis import CPU, Analysis, LoadedRun, RunResult
from trainer.observability.figures import GridRow, picture_grid
from trainer.observability.view_grid import to_nhwc
from trainer.probes.features import LabelSpace, Pictures, frozen
from trainer.views.colour import LUMA
from trainer.views.inputs import to_floating

NUM_COLUMNS = 8


class FiltersConfig(Schema):
    """The settings of the analysis of filters."""

    num_pictures: Count = Field(2000, description="The test pictures that are measured.")
    num_shown: Count = Field(12, description="The features that the picture shows.")


class Sparsity(Schema):
    """Sparsity of the map before pooling; values below 0 count as 0.

    active_share: the share of values above 0.
    treves_rolls: 1 - (mean)^2 / mean of squares (Rolls and Tovee 1995).
    hoyer: Hoyer's measure (2004).
    dead_share: the share of channels that fire on no picture.

    `treves_rolls` and `hoyer` are means over pictures; each is from 0 (all values equal) to nearly 1 (a single value).
    All are None if the map is not finite.
    """

    active_share: Measured
    treves_rolls: Measured
    hoyer: Measured
    dead_share: Measured


class FiltersResult(RunResult):
    """analysis/filters.json.

    colour_r2: the share of the pooled features' variance that a linear function of the picture's mean colour explains.
    chroma_r2: the part of `colour_r2` that the mean brightness (`LUMA`) does not explain; None without three colours.
    shown: the channels of the figure, those that vary most first.
    """

    config: FiltersConfig
    num_pictures: int
    num_channels: int
    sparsity: Sparsity
    colour_r2: Measured
    chroma_r2: Measured
    silhouette: dict[LabelSpace, Measured]
    shown: tuple[int, ...]


def measure(loaded: LoadedRun, config: FiltersConfig) -> tuple[FiltersResult, bytes]:
    """Return the numbers and the figure.

    Raises `UserError` for sounds, and for an encoder whose last map is not (B, C, H, W).
    """
    test = loaded.read_test(pictures_for="filters")
    rows_N = loaded.choose_rows(test, config.num_pictures)
    sparsity, pooled = _measure(loaded, rows_N)
    colour_NC = (test.images(rows_N).double() / 255).mean((2, 3)).to(loaded.device)
    colour_r2, chroma_r2 = explained_share(colour_NC, pooled), None
    if colour_NC.shape[1] == len(LUMA):
        chroma_r2 = colour_r2 - explained_share(colour_NC @ colour_NC.new_tensor(LUMA)[:, None], pooled)
    unit = F.normalize(pooled, dim=1).cpu().numpy()
    shown = tuple(pooled.var(0).argsort(descending=True)[: config.num_shown].tolist())
    result = FiltersResult(
        config=config,
        num_pictures=len(rows_N),
        num_channels=pooled.shape[1],
        sparsity=sparsity,
        colour_r2=colour_r2,
        chroma_r2=chroma_r2,
        silhouette={space: silhouette(unit, test.by_label[space][rows_N].numpy()) for space in test.class_labels},
        shown=shown,
        **loaded.facts,
    )
    return result, _picture(test, rows_N, pooled, shown)


ANALYSIS = Analysis("filters", FiltersConfig, measure)


def sparsity_of(map_BCHW: Tensor) -> dict[str, Tensor]:
    """Return (B,) float64 active_share, treves_rolls and hoyer of each picture (see `Sparsity`), and `fires` (B, C)."""
    r_BP = map_BCHW.flatten(1).double().clamp_min(0)
    is_finite_B = map_BCHW.flatten(1).isfinite().all(1)
    num = r_BP.shape[1]
    squares_B = r_BP.square().sum(1)
    silent_B = squares_B == 0
    share_B = r_BP.sum(1).square() / squares_B.clamp_min(torch.finfo(torch.float64).tiny)  # from 1 to num
    return {
        "active_share": (r_BP > 0).double().mean(1).masked_fill(~is_finite_B, torch.nan),
        "treves_rolls": (1 - share_B / num).masked_fill(silent_B, 0.0),
        "hoyer": ((num**0.5 - share_B.sqrt()) / (num**0.5 - 1)).masked_fill(silent_B, 0.0),
        "fires": map_BCHW.amax((2, 3)) > 0,
    }


def silhouette(x_NC: NDArray[np.float64], label_N: NDArray[np.int64]) -> float | None:
    """Return the mean silhouette of Euclidean distances (Rousseeuw 1987), of the samples with a label.

    None unless there are at least two classes and fewer classes than samples, and all of `x_NC` is finite.
    """
    x_NC, label_N = x_NC[label_N != NO_LABEL], label_N[label_N != NO_LABEL]
    num_classes = len(np.unique(label_N))
    if not 1 < num_classes < len(label_N) or not np.isfinite(x_NC).all():
        return None
    return float(silhouette_score(x_NC, label_N))


def explained_share(x_NP: Tensor, y_NC: Tensor) -> float:
    """Return R^2 of the least-squares fit of y by x and a constant, over all columns of y together.

    0 if y is constant, nan if it is not finite.
    """
    x, y = x_NP - x_NP.mean(0), y_NC - y_NC.mean(0)
    total = y.square().sum()
    if total == 0 or not total.isfinite():
        return 0.0 if total == 0 else math.nan
    # By the singular vectors, so that linearly dependent columns of x do no harm.
    left, singular, _ = torch.linalg.svd(x, full_matrices=False)
    basis = left[:, singular > singular.max() * 1e-10]
    return float((basis.T @ y).square().sum() / total)


def _measure(loaded: LoadedRun, rows_N: Tensor) -> tuple[Sparsity, Tensor]:
    """Return the sparsity of the map and the pooled features (N, C) float64 of test pictures without views."""
    encoder, pooled, measured = loaded.modules.encoder, [], []
    maps: list[Tensor] = []
    hook = encoder.trunk.register_forward_hook(lambda module, args, output: maps.append(output))
    try:
        with frozen(encoder):
            for images_BCHW in torch.split(loaded.test.images(rows_N), 256):
                pooled.append(encoder.pooled(to_floating(images_BCHW.to(loaded.device))).double())
                map_BCHW = maps.pop()
                if map_BCHW.dim() != 4:
                    raise UserError(
                        f"filters needs a convolutional encoder, but the last map of {loaded.run_dir.path} has the "
                        f"shape {tuple(map_BCHW.shape[1:])}, not (channels, height, width); pass another run"
                    )
                measured.append(sparsity_of(map_BCHW))
    finally:
        hook.remove()
    values = {name: torch.cat([one[name] for one in measured]) for name in measured[0]}
    dead_share = 1 - values.pop("fires").any(0).double().mean().item()
    means = {name: value_N.mean().item() for name, value_N in values.items()}
    return Sparsity(**means, dead_share=dead_share if math.isfinite(means["hoyer"]) else None), torch.cat(pooled)


def _picture(test: Pictures, rows_N: Tensor, pooled_NC: Tensor, shown: Sequence[int]) -> bytes:
    """Draw a row for each shown channel: the pictures on which it is highest, the highest first."""
    num = min(NUM_COLUMNS, len(rows_N))
    rows = [
        GridRow(f"channel {channel}", to_nhwc(to_floating(test.images(rows_N[highest_B.cpu()]).to(CPU))))
        for channel, highest_B in zip(shown, pooled_NC[:, list(shown)].topk(num, dim=0).indices.T, strict=True)
    ]
    return picture_grid(rows, column_titles=[""] * num)
