"""What a view policy does to pictures: a grid to look at, and how much it changes where the object was drawn.

The pictures of sounds are their spectrograms, and a change of those is measured in units of the normalised spectrogram.

A viewmaker that has learned to destroy the object spends its budget there: its *selectivity*, the mean absolute change
inside the object's box over that of the whole picture, exceeds 1 (cf. the difference images of Tamkin et al. 2022).

Shapes: N pictures, B batch, C channels, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from data_pipeline.core.sample import MASK_BOX, MASK_OBJECT
from data_pipeline.core.schema import Count, Measured, Schema
from trainer.analyses.analysis import of_each_run
from trainer.analyses.figures import GridRow, difference_gain, difference_pictures, picture_grid
from trainer.analyses.loaded_run import CPU, AnalysisOptions, load_run, view_batches, write_result
from trainer.probes.features import Pictures, ViewFunction
from trainer.run_dir import RunDir


class ViewsAnalysisConfig(Schema):
    """The settings of the analysis of views."""

    num_pictures: Count = Field(1024, description="The test samples that are measured.")
    num_shown: Count = Field(8, description="The samples that the picture shows.")


class ViewsResult(Schema):
    """RUN_DIR/analysis/views.json. Changes are mean |view - picture| in [0, 1] units (of sounds: in those of the
    normalised spectrogram) over the first `num_pictures` test pictures, one view each. `object` is the drawn pixels,
    `box` the tight box around them; None if nothing was drawn, and for sounds. Any change is None if a view is not
    finite, as those of a viewmaker that diverged. `shown` are the dataset indices of the grid.
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


_DEFAULT, _NEWEST = ViewsAnalysisConfig(), AnalysisOptions()


@dataclass(frozen=True)
class Change:
    """Mean absolute change everywhere and where the mask is at least at a level; None where it never is."""

    overall: float
    in_box: float | None
    in_object: float | None


def analyze_views(
    run_dir: RunDir, *, config: ViewsAnalysisConfig = _DEFAULT, options: AnalysisOptions = _NEWEST
) -> list[Path]:
    """Write analysis/views.json and views.png of a run; returns their paths. Raises `UserError` if data is missing."""
    return write_result(run_dir, "views", *measure_views(run_dir, config=config, options=options))


ANALYSIS = of_each_run(ViewsAnalysisConfig, analyze_views)


def measure_views(
    run_dir: RunDir, *, config: ViewsAnalysisConfig = _DEFAULT, options: AnalysisOptions = _NEWEST
) -> tuple[ViewsResult, bytes]:
    """Return the numbers and the grid as PNG. Raises `UserError` if data is missing."""
    loaded = load_run(run_dir, options)
    players, test, seed, device = loaded.players, loaded.test, loaded.seed, loaded.device
    policy = players.view_policy
    measured = torch.arange(len(test))[: config.num_pictures]
    picture_NCHW, view_NCHW = draw_views(policy, test, measured, seed=seed, view=0, device=device)
    masks_NHW = None if test.masks_NHW is None else test.masks_NHW[measured]
    change = mean_change(view_NCHW - picture_NCHW, masks_NHW)
    shown = choose_pictures(test, config.num_shown)
    grid, gain = view_grid(policy, test, shown, seed=seed, device=device)
    result = ViewsResult(
        checkpoint_step=players.step,
        views=players.config.views.kind,
        num_pictures=len(picture_NCHW),
        change=change.overall,
        change_in_box=change.in_box,
        change_in_object=change.in_object,
        selectivity_box=ratio(change.in_box, change.overall),
        selectivity_object=ratio(change.in_object, change.overall),
        difference_gain=gain,
        shown=tuple(test.index_N[shown].tolist()),
        test_manifest_sha256=test.manifest.sha256,
    )
    return result, grid


def draw_views(
    policy: ViewFunction, pictures: Pictures, rows_N: Tensor, *, seed: int, view: int, device: torch.device = CPU
) -> tuple[Tensor, Tensor]:
    """Pictures of `rows_N` and one view of each, both (N, C, H, W) float32 on the CPU, drawn as in the first epoch."""
    batches = view_batches(policy, pictures, rows_N, seed=seed, view=view, device=device)
    image_parts, view_parts = zip(*((batch.seen_BCHW.cpu(), batch.views_BCHW.cpu()) for batch in batches), strict=True)
    return torch.cat(image_parts), torch.cat(view_parts)


def mean_change(difference_NCHW: Tensor, masks_NHW: Tensor | None) -> Change:
    """Mean |difference| over all pixels, over those with mask >= `MASK_BOX` and over those with `MASK_OBJECT`."""
    change_NHW = difference_NCHW.abs().mean(1)

    def inside(level: int) -> float | None:
        if masks_NHW is None:
            return None
        chosen = change_NHW[masks_NHW >= level]
        return chosen.mean().item() if len(chosen) else None

    return Change(overall=change_NHW.mean().item(), in_box=inside(MASK_BOX), in_object=inside(MASK_OBJECT))


def choose_pictures(pictures: Pictures, num: int) -> Tensor:
    """Rows of up to `num` pictures that show every class in turn: the first of each, then the second of each, ..."""
    seen: dict[int, int] = {}
    turn: list[tuple[int, int, int]] = []
    for row, label in enumerate(pictures.label_base_N.tolist()):
        seen[label] = seen.get(label, 0) + 1
        turn.append((seen[label], label, row))
    return torch.tensor([row for _, _, row in sorted(turn)[:num]])


def view_grid(
    policy: ViewFunction, pictures: Pictures, rows_N: Tensor, *, seed: int, device: torch.device = CPU
) -> tuple[bytes, int]:
    """The grid as PNG and the gain of its difference rows: picture, view 1, difference, view 2, difference.

    Spectrograms are shown in grey from their lowest value in black to their highest in white, low bands below; the gain
    is then of that range.
    """
    picture_NCHW, first_NCHW = draw_views(policy, pictures, rows_N, seed=seed, view=0, device=device)
    _, second_NCHW = draw_views(policy, pictures, rows_N, seed=seed, view=1, device=device)
    parts = [picture_NCHW, first_NCHW, second_NCHW]
    if pictures.sounds is not None:
        low, high = picture_NCHW.min(), picture_NCHW.max()
        parts = [((part - low) / (high - low)).flip(2) for part in parts]
    picture, first, second = (_to_nhwc(part) for part in parts)
    gain = difference_gain(first - picture, second - picture)
    rows = [GridRow("picture", picture)]
    for number, view in ((1, first), (2, second)):
        rows.append(GridRow(f"view {number}", np.clip(view, 0.0, 1.0)))
        rows.append(GridRow(f"difference\n× {gain}", difference_pictures(view - picture, gain=gain)))
    return picture_grid(rows, column_titles=[_title(pictures, row) for row in rows_N.tolist()]), gain


def _title(pictures: Pictures, row: int) -> str:
    """The class of the picture, and that of the object drawn on it."""
    base = pictures.class_names("base")[int(pictures.label_base_N[row])]
    overlay = pictures.class_names("overlay")
    return f"{base} · {overlay[int(pictures.label_overlay_N[row])]}" if overlay else base


def _to_nhwc(pictures_NCHW: Tensor) -> NDArray[np.float32]:
    """(N, H, W, 3); one channel is shown in grey."""
    array: NDArray[np.float32] = pictures_NCHW.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
    return array


def ratio(part: float | None, whole: float) -> float | None:
    """`part / whole`; None where there is no part, or the whole is nothing."""
    return part / whole if part is not None and whole > 0 else None
