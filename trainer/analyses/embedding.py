"""Draw a map of the features, coloured by each label, to see if they form clusters, and of which label.

The picture is t-SNE (van der Maaten and Hinton 2008). Compare runs by the number: the
silhouette of each label (Rousseeuw 1987) in the space of the features, from -1 to 1, where 0 means no clusters.

Shapes: N samples, C channels of the pooled features.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from pydantic import Field
from sklearn.manifold import TSNE
from sklearn.metrics import silhouette_score
from torch.nn import functional as F

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import NO_LABEL
from data_pipeline.core.schema import Measured, Schema
from trainer.analyses.analysis import Analysis, LoadedRun, RunResult, plain_vectors
from trainer.observability.figures import to_png
from trainer.probes.features import LabelSpace


class EmbeddingConfig(Schema):
    """The settings of the map of features."""

    num_samples: Annotated[int, Field(ge=4, le=10**6)] = Field(2000, description="The test samples on the map.")
    perplexity: Annotated[float, Field(ge=2, le=1e6)] = Field(30.0, description="The perplexity of t-SNE.")


class EmbeddingResult(RunResult):
    """analysis/embedding.json.

    silhouette: by label, of the unit features; None for a label with a single class among the samples.
    """

    config: EmbeddingConfig
    num_samples: int
    silhouette: dict[LabelSpace, Measured]


def measure(loaded: LoadedRun, config: EmbeddingConfig) -> tuple[EmbeddingResult, bytes]:
    """Return the silhouettes and the map.

    Raises `UserError` if features are not finite or all equal.
    """
    run = loaded.run_dir.path
    rows_N = loaded.choose_rows(loaded.test, config.num_samples)
    unit_NC = F.normalize(plain_vectors(loaded, rows_N)["pooled"].double(), dim=1).cpu().numpy()
    if not np.isfinite(unit_NC).all():
        raise UserError(f"the features of {run} at step {loaded.modules.step} are not all finite; take another --step")
    if (unit_NC == unit_NC[0]).all():  # on which t-SNE divides by 0, and ends the process
        raise UserError(
            f"all {len(rows_N)} test samples of {run} have the same features at step {loaded.modules.step}, "
            "so there is nothing to map; the encoder has collapsed, or all samples are equal"
        )
    points_N2 = map_of(unit_NC, perplexity=config.perplexity, seed=loaded.seed)
    labels = {space: loaded.test.by_label[space][rows_N].numpy() for space in loaded.test.class_labels}
    result = EmbeddingResult(
        config=config,
        num_samples=len(rows_N),
        silhouette={space: silhouette(unit_NC, label_N) for space, label_N in labels.items()},
        **loaded.facts,
    )
    figure = Figure(figsize=(6.4 * max(1, len(labels)), 5), layout="constrained")
    panels = figure.subplots(1, max(1, len(labels)), squeeze=False)[0]
    if not labels:
        panels[0].scatter(*points_N2.T, s=9, alpha=0.75, linewidths=0)
        panels[0].set_title(f"{loaded.config.data.test_dir} has no label to colour it by", fontsize=11)
        return result, to_png(figure)
    for axes, (space, label_N) in zip(panels, labels.items(), strict=True):
        _draw(axes, points_N2, label_N, names=loaded.test.class_names(space))
        score = result.silhouette[space]
        axes.set_title(
            f"label_{space}" + ("" if score is None else f", silhouette of features {score:.3f}"), fontsize=11
        )
    return result, to_png(figure)


ANALYSIS = Analysis("embedding", EmbeddingConfig, measure)


def silhouette(x_NC: NDArray[np.float64], label_N: NDArray[np.int64]) -> float | None:
    """Return the mean silhouette of Euclidean distances, of the samples with a label.

    None unless there are at least two classes and fewer classes than samples, and all of `x_NC` is finite.
    """
    x_NC, label_N = x_NC[label_N != NO_LABEL], label_N[label_N != NO_LABEL]
    num_classes = len(np.unique(label_N))
    if not 1 < num_classes < len(label_N) or not np.isfinite(x_NC).all():
        return None
    return float(silhouette_score(x_NC, label_N))


def map_of(x_NC: NDArray[np.float64], *, perplexity: float, seed: int) -> NDArray[np.float64]:
    """Return points (N, 2) of a map that keeps near rows near; deterministic for input and seed on one machine."""
    most = (len(x_NC) - 1) / 3  # t-SNE allows no more
    random_state = seed % 2**32  # what NumPy's legacy generator takes
    made = TSNE(perplexity=min(perplexity, most), init="pca", random_state=random_state).fit_transform(x_NC)
    return np.asarray(made, dtype=np.float64)


def _draw(axes: Axes, points_N2: NDArray[np.float64], label_N: NDArray[np.int64], *, names: tuple[str, ...]) -> None:
    colors = colormaps["tab10" if len(names) <= 10 else "turbo"](np.linspace(0, 1, len(names)))
    for number, (name, color) in enumerate(zip(names, colors, strict=True)):
        of_class = label_N == number
        axes.scatter(
            points_N2[of_class, 0], points_N2[of_class, 1], s=9, alpha=0.75, linewidths=0, color=color, label=name
        )
    axes.set(xticks=[], yticks=[])
    axes.set_aspect("equal", adjustable="datalim")
    axes.spines[:].set_alpha(0.3)
    columns = 1 + (len(names) - 1) // 16
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9, markerscale=2, ncols=columns)
