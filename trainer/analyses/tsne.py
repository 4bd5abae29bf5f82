"""Draw a map of the features by t-SNE (van der Maaten and Hinton 2008), coloured by each label.

Huang et al. (2023) show the maps of several methods side by side: `--together FILE`. Distances on a map say little. The
silhouettes in the titles are of the features, as in `trainer.analyses.filters`.

Shapes: N samples, C channels of the pooled features.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from numpy.typing import NDArray
from pydantic import Field
from sklearn.manifold import TSNE
from torch.nn import functional as F

from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import Measured, Schema, shown
from trainer.analyses.analysis import Analysis, LoadedRun, RunResult, plain_vectors
from trainer.analyses.filters import silhouette
from trainer.observability.figures import to_png
from trainer.probes.features import LabelSpace


class TSNEConfig(Schema):
    """The settings of the map."""

    num_samples: Annotated[int, Field(ge=4, le=10**6)] = Field(2000, description="The test samples on the map.")
    perplexity: Annotated[float, Field(ge=2, le=1e6)] = Field(30.0, description="About the number of near neighbours.")


class TSNEResult(RunResult):
    """analysis/tsne.json. silhouette: by label, of the unit features; None for a label with a single class."""

    config: TSNEConfig
    silhouette: dict[LabelSpace, Measured]


def measure(loaded: LoadedRun, config: TSNEConfig) -> tuple[TSNEResult, bytes]:
    """Return the silhouettes and the map. Raises `UserError` if features are not finite, or all equal."""
    test, rows_N = loaded.test, loaded.choose_rows(loaded.test, config.num_samples)
    unit_NC = F.normalize(plain_vectors(loaded, rows_N)["pooled"].double(), dim=1).cpu().numpy()
    if not np.isfinite(unit_NC).all() or (unit_NC == unit_NC[0]).all():  # which would end the process in t-SNE
        raise UserError(
            f"the features of {loaded.run_dir.path} at step {loaded.modules.step} are not finite or all equal, so "
            "there is nothing to map; take another --step"
        )
    points_N2 = map_of(unit_NC, perplexity=config.perplexity, seed=loaded.seed)
    labels = {space: test.by_label[space][rows_N].numpy() for space in test.class_labels}
    scores = {space: silhouette(unit_NC, label_N) for space, label_N in labels.items()}
    figure = Figure(figsize=(6.4 * max(1, len(labels)), 5), layout="constrained")
    panels = figure.subplots(1, max(1, len(labels)), squeeze=False)[0]
    for axes in panels:
        axes.scatter(*points_N2.T, s=14, color="lightgrey", linewidths=0)  # stays where a sample has no label
        axes.set(xticks=[], yticks=[])
    for axes, (space, label_N) in zip(panels, labels.items(), strict=False):
        names = test.class_names(space)
        for number, name in enumerate(names):
            color = colormaps["tab10"](number) if len(names) <= 10 else colormaps["turbo"](number / len(names))
            axes.scatter(*points_N2[label_N == number].T, s=14, linewidths=0, color=color, label=name)
        title = test.manifest.labels[space].title or f"{space} label"
        axes.set_title(f"{title}: silhouette of the features {shown(scores[space], '.3f')}", fontsize=11)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9, ncols=1 + len(names) // 17)
    return TSNEResult(config=config, silhouette=scores, **loaded.facts), to_png(figure)


ANALYSIS = Analysis("tsne", TSNEConfig, measure)


def map_of(x_NC: NDArray[np.float64], *, perplexity: float, seed: int) -> NDArray[np.float32]:
    """Return a point for each row, (N, 2): near rows get near points. It is a function of the input and the seed."""
    most = (len(x_NC) - 1) / 3  # t-SNE allows no more
    random_state = seed % 2**32  # what NumPy's older generator takes
    points_N2 = TSNE(perplexity=min(perplexity, most), init="pca", random_state=random_state).fit_transform(x_NC)
    return np.asarray(points_N2, dtype=np.float32)
