"""Show the effect of a view policy on pictures: a grid to look at, and the size of the change on the drawn object.

The pictures of sounds are their spectrograms; changes are then in units of the normalised spectrogram.

The *selectivity* is the mean absolute change inside the object's box over the mean change of the whole picture. If a
viewmaker has learned to destroy the object, it spends its budget there, and the selectivity exceeds 1 (compare the
difference images of Tamkin et al. 2022).

Shapes: N pictures, B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from data_pipeline.core.sample import MASK_BOX, MASK_OBJECT
from data_pipeline.core.schema import Count, Measured, Schema
from trainer.analyses.analysis import Analysis, LoadedRun
from trainer.observability.view_grid import choose_pictures, view_grid
from trainer.probes.view_batches import view_batches


class ViewsAnalysisConfig(Schema):
    """The settings of the analysis of views."""

    num_pictures: Count = Field(1024, description="The test samples that are measured.")
    num_shown: Count = Field(8, description="The samples that the picture shows.")


class ViewsResult(Schema):
    """RUN_DIR/analysis/views.json.

    change: the mean of |view - picture| over the first `num_pictures` test pictures, with one view each. Its unit is
        the range from black to white, or that of the normalised spectrogram.
    change_in_object, change_in_box: on the drawn pixels, and in the tight box around them; None for sounds and if
        nothing was drawn.
    shown: the dataset indices of the grid.

    All changes are None if a view is not finite, as after a viewmaker has diverged.
    """

    checkpoint_step: int
    views: str
    num_pictures: int
    change: Measured
    change_in_box: Measured
    change_in_object: Measured
    selectivity_box: Measured
    selectivity_object: Measured
    difference_gain: int
    shown: tuple[int, ...]
    test_manifest_sha256: str


def measure_views(loaded: LoadedRun, config: ViewsAnalysisConfig) -> tuple[ViewsResult, bytes]:
    """Return the numbers and the grid as PNG. Raises `UserError` if data is missing."""
    modules, test, seed, device = loaded.modules, loaded.test, loaded.seed, loaded.device
    policy = modules.view_policy
    measured = torch.arange(len(test))[: config.num_pictures]
    batches = view_batches(policy, test, measured, seed=seed, view=0, device=device)
    change, in_box, in_object = mean_change([(batch.change(), batch.masks_BHW) for batch in batches])
    shown = choose_pictures(test, config.num_shown)
    grid, gain = view_grid(policy, test, shown, seed=seed, device=device)
    result = ViewsResult(
        checkpoint_step=modules.step,
        views=modules.config.views.kind,
        num_pictures=len(measured),
        change=change,
        change_in_box=in_box,
        change_in_object=in_object,
        selectivity_box=ratio(in_box, change),
        selectivity_object=ratio(in_object, change),
        difference_gain=gain,
        shown=tuple(test.samples.index_B[shown].tolist()),
        test_manifest_sha256=test.manifest.sha256,
    )
    return result, grid


ANALYSIS = Analysis("views", ViewsAnalysisConfig, measure_views)


def mean_change(parts: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[float, float | None, float | None]:
    """Return the mean change of all pixels, of those in the box (mask >= `MASK_BOX`) and of those of the object.

    `parts` are changes and masks of batches. The last two results are None if the masks have none, or for sounds.
    """
    change_NHW = torch.cat([change_BHW for change_BHW, _ in parts]).cpu()
    masks = [masks_BHW for _, masks_BHW in parts if masks_BHW is not None]

    def inside(level: int) -> float | None:
        if not masks:
            return None
        chosen = change_NHW[torch.cat(masks) >= level]
        return chosen.mean().item() if len(chosen) else None

    return change_NHW.mean().item(), inside(MASK_BOX), inside(MASK_OBJECT)


def ratio(part: float | None, whole: float) -> float | None:
    """Return `part / whole`; None if there is no part, or if the whole is 0."""
    return part / whole if part is not None and whole > 0 else None
