"""Show the test samples of which the linear probes of a run are most confidently wrong.

Shapes: N samples, F features, K classes of a label, M mistakes.
"""

from __future__ import annotations

from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from data_pipeline.core.sample import NO_LABEL
from data_pipeline.core.schema import Count, Schema
from trainer.analyses.analysis import Analysis, LoadedRun, RunResult
from trainer.analyses.feature_dropout import heads_of
from trainer.observability.figures import to_png
from trainer.observability.view_grid import as_shown
from trainer.probes.features import LabelSpace, encode, frozen
from trainer.views.inputs import to_floating

_COLUMNS = 6


class MistakesConfig(Schema):
    """The settings of the analysis of mistakes."""

    num_shown: Count = Field(12, description="The mistakes that are shown of each label.")


class Mistake(Schema):
    """A test sample by its index in the dataset: its right class, the class that is read, and its probability."""

    index: int
    right: str
    read: str
    probability: float


class MistakesResult(RunResult):
    """RUN_DIR/analysis/mistakes.json.

    mistakes: by label, the most confident ones first.
    """

    classifier: str
    mistakes: dict[LabelSpace, tuple[Mistake, ...]]


def measure(loaded: LoadedRun, config: MistakesConfig) -> tuple[MistakesResult, bytes]:
    """Return the mistakes and their pictures, of every label that was probed. Raises `UserError` like `heads_of`."""
    heads, test, encoder = heads_of(loaded), loaded.test, loaded.modules.encoder
    with frozen(encoder):
        [features_NF] = encode(lambda x_BCHW: [encoder.features(x_BCHW)], test, device=loaded.device)
    rows_of, mistakes = dict[LabelSpace, Tensor](), dict[LabelSpace, tuple[Mistake, ...]]()
    for space, head in heads.by_label.items():
        names, right_N = test.class_names(space), test.by_label[space]
        probability_NK = head.logits(features_NF.to(loaded.device)).double().softmax(1).cpu()
        sure_N, read_N = probability_NK.max(1)
        wrong_M = ((read_N != right_N) & (right_N != NO_LABEL)).nonzero()[:, 0]
        rows_of[space] = wrong_M[sure_N[wrong_M].argsort(descending=True, stable=True)][: config.num_shown]
        mistakes[space] = tuple(
            Mistake(
                index=int(test.samples.index_B[row]),
                right=names[int(right_N[row])],
                read=names[int(read_N[row])],
                probability=sure_N[row].item(),
            )
            for row in rows_of[space].tolist()
        )
    result = MistakesResult(classifier=heads.made_by, mistakes=mistakes, **loaded.facts)
    return result, _figure(loaded, result, rows_of)


ANALYSIS = Analysis("mistakes", MistakesConfig, measure)


def _figure(loaded: LoadedRun, result: MistakesResult, rows_of: dict[LabelSpace, Tensor]) -> bytes:
    """Draw a block of pictures for each label, each with the class that is read, its probability, and the right one."""
    shown = {space: found for space, found in result.mistakes.items() if found}
    heights = [-(-len(found) // _COLUMNS) for found in shown.values()]
    figure = Figure(figsize=(1.35 * _COLUMNS, 1.75 * sum(heights) + 0.4 * len(heights) + 0.1), layout="constrained")
    blocks = figure.subfigures(max(1, len(heights)), squeeze=False, height_ratios=heights or None)[:, 0]
    for block, height, (space, found) in zip(blocks, heights, shown.items(), strict=False):
        block.suptitle(loaded.test.manifest.labels[space].title or f"{space} label", fontsize=10, fontweight="bold")
        grid = block.subplots(height, _COLUMNS, squeeze=False).flat
        for axes in grid:
            axes.set_axis_off()
        [pictures] = as_shown(loaded.test, to_floating(loaded.test.images(rows_of[space])).cpu())
        for axes, picture_HWC, one in zip(block.axes, pictures, found, strict=False):
            axes.imshow(picture_HWC.clip(0, 1))
            axes.set_title(f"read {one.read}, {100 * one.probability:.0f} %\nright {one.right}", fontsize=8)
    return to_png(figure)
