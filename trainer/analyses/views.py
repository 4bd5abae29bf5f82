"""Show the effect of a view policy on pictures: a grid to look at, and the size of the change on the drawn object.

The pictures of sounds are their spectrograms; changes are then in units of the normalised spectrogram.

The *selectivity* is the mean absolute change inside the object's box over the mean change of the whole picture. If a
viewmaker has learned to destroy the object, it spends its budget there, and the selectivity exceeds 1 (compare the
difference images of Tamkin et al. 2022).

The object of a sound is its speech: the cells of the spectrogram in which the speech has more power than the background
(the ideal binary mask of Wang 2005). Its box is the band of speech: all frames of the mel bands in which the speech has
more power than the background, summed over all sounds.

Shapes: N pictures, B batch, C channels, H height (mel bands of sounds), W width (frames of sounds).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from data_pipeline.audio.log_mel import power_mel
from data_pipeline.core.sample import MASK_BOX, MASK_OBJECT
from data_pipeline.core.schema import Count, Measured, Schema
from trainer.analyses.analysis import Analysis, LoadedRun
from trainer.observability.view_grid import choose_pictures, view_grid
from trainer.probes.features import Pictures
from trainer.probes.view_batches import view_batches


class ViewsAnalysisConfig(Schema):
    """The settings of the analysis of views."""

    num_pictures: Count = Field(1024, description="The test samples that are measured.")
    num_shown: Count = Field(8, description="The samples that the picture shows.")


class ViewsResult(Schema):
    """RUN_DIR/analysis/views.json.

    change: the mean of |view - picture| over the first `num_pictures` test pictures, with one view each. Its unit is
        the range from black to white, or that of the normalised spectrogram.
    change_in_object, change_in_box: on the drawn pixels, and in the tight box around them; of sounds, on the speech and
        in its band. None if nothing was drawn, or for sounds without an online background.
    change_by_band: of sounds, the change in each mel band, from low to high.
    speech_by_band, background_by_band: the share of the power of all speech, or of all backgrounds, in each band.
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
    change_by_band: tuple[Measured, ...] | None = None
    speech_by_band: tuple[float, ...] | None = None
    background_by_band: tuple[float, ...] | None = None
    test_manifest_sha256: str


def measure_views(loaded: LoadedRun, config: ViewsAnalysisConfig) -> tuple[ViewsResult, bytes]:
    """Return the numbers and the grid as PNG. Raises `UserError` if data is missing."""
    modules, test, seed, device = loaded.modules, loaded.test, loaded.seed, loaded.device
    policy = modules.view_policy
    measured = torch.arange(len(test))[: config.num_pictures]
    batches = view_batches(policy, test, measured, seed=seed, view=0, device=device)
    parts = [(batch.change(), batch.masks_BHW) for batch in batches]
    change, in_box, in_object = mean_change(parts)
    bands: dict[str, Sequence[float]] = {}
    if test.are_sounds and test.overlay is not None:
        change_NHW = torch.cat([change_BHW for change_BHW, _ in parts]).cpu()
        speech_NHW, background_NHW = speech_and_background(test, measured)
        by_band = {"speech": speech_NHW.sum((0, 2)), "background": background_NHW.sum((0, 2))}
        in_object = mean_or_none(change_NHW[speech_NHW > background_NHW])
        in_box = mean_or_none(change_NHW[:, by_band["speech"] > by_band["background"]])
        bands = {f"{name}_by_band": (power_H / power_H.sum()).tolist() for name, power_H in by_band.items()}
        bands["change_by_band"] = change_NHW.mean((0, 2)).tolist()
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
        **bands,
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
        return mean_or_none(change_NHW[torch.cat(masks) >= level]) if masks else None

    return change_NHW.mean().item(), inside(MASK_BOX), inside(MASK_OBJECT)


def speech_and_background(sounds: Pictures, rows_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the power (N, H, W) of the speech and of the background in each mel band and frame.

    The background is the rest of a mixture, so the sounds need an online overlay.
    """
    assert sounds.mel is not None
    speech_NT = replace(sounds, overlay=None).inputs(rows_N).inputs_a
    mixed_NT = sounds.inputs(rows_N).inputs_a
    return power_mel(speech_NT, sounds.mel), power_mel(mixed_NT - speech_NT, sounds.mel)


def mean_or_none(chosen: Tensor) -> float | None:
    """Return the mean of all values; None if there are none."""
    return chosen.mean().item() if chosen.numel() else None


def ratio(part: float | None, whole: float) -> float | None:
    """Return `part / whole`; None if there is no part, or if the whole is 0."""
    return part / whole if part is not None and whole > 0 else None
