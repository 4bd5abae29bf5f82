"""Make a page on which a person moves sliders for sample, budget and draw, and sees views and what probes read in them.

Each run's policy makes views of the same test samples, and the encoder and linear probes of every run read them. The
page is one file: it holds the pictures, and the readings as JSON. Its script shows them, and subtracts pixels.

A viewmaker is also shown at other budgets than the one that it was trained with, which is an extrapolation.

Shapes: N samples, F features, K classes of a label, C channels, H height, W width.
"""

from __future__ import annotations

import base64
import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.core.progress import Progress
from data_pipeline.core.sample import NO_LABEL
from data_pipeline.core.schema import Count, Measured, Schema
from trainer.analyses.analysis import Analysis, LoadedRun
from trainer.analyses.feature_dropout import Judge, judges_of
from trainer.observability.figures import difference_gain, to_png
from trainer.observability.view_grid import as_shown, choose_pictures
from trainer.probes.features import LabelSpace, ViewFunction, frozen
from trainer.probes.view_batches import ViewBatch, view_batches
from trainer.run_dir import write_atomically
from trainer.views.viewmaker import Viewmaker

_TEMPLATE = Path(__file__).with_name("play.html")
_LARGEST = 64  # rows or columns of a picture on the page; a larger one is averaged down
_DIGITS = 4  # of a number on the page


class PlayConfig(Schema):
    """The settings of the page."""

    num_samples: Count = Field(8, description="The test samples that the page shows.")
    num_draws: Count = Field(3, description="The draws of each view, with the seeds from --seed on.")
    num_measured: Count = Field(256, description="The test samples whose views, in the first draw, give accuracies.")
    budgets: tuple[Annotated[float, Field(gt=0, le=100)], ...] = Field(
        (0.25, 0.5, 1.0, 2.0, 4.0), description="The budgets of a viewmaker, as multiples of that of its training."
    )


def measure(loaded_runs: Sequence[LoadedRun], config: PlayConfig) -> dict[str, Any]:
    """Return the state of the page. Raises `UserError` like `judges_of`.

    samples: the dataset indices of the N samples that are shown.
    labels: for each label its title, its classes, and the right class of each sample, `NO_LABEL` if it has none.
    plain: the samples without views: a `sheet`, which is a PNG in base64 with the samples side by side, and `readings`.
    policies: for each run its name, its budget (None without a viewmaker), how its `probe` was fitted, the gain of
        differences, and a sheet with a row for each of its `views`. A view has the multiple of the budget, the seed and
        the readings.
    readings: for each label and each run, lists of N: the class that is read, the probability of it (`sure`) and of the
        right class (`right`). `accuracy` is over `num_measured` samples; for other seeds than the first over the N
        shown. A class of scores that are not finite is negative; a number that is not finite is None.
    """
    judges, spaces = judges_of(loaded_runs, analysis="play")
    test, seed = loaded_runs[0].test, loaded_runs[0].seed
    rows_M = choose_pictures(test, max(config.num_measured, config.num_samples))
    shown_N = rows_M[: config.num_samples]
    label_M = {space: test.by_label[space][rows_M] for space in spaces}
    seeds = [seed + draw for draw in range(config.num_draws)]
    times = sorted({1.0, *config.budgets})

    def draw(policy: ViewFunction, loaded: LoadedRun, number: int) -> list[ViewBatch]:
        rows = rows_M if number == seed else shown_N
        return list(view_batches(policy, loaded.test, rows, seed=number, view=0, device=loaded.device))

    def read(batches: Sequence[Tensor]) -> list[list[dict[str, Any]]]:
        return _read(judges, batches, label_M, len(shown_N))

    def small(batches: Sequence[Tensor]) -> Tensor:
        shown_NCHW = torch.cat(list(batches))[: len(shown_N)].cpu()
        scale = min(1.0, _LARGEST / max(shown_NCHW.shape[2:]))
        return F.interpolate(
            shown_NCHW, size=[max(1, round(scale * side)) for side in shown_NCHW.shape[2:]], mode="area"
        )

    plain = [batch.seen_BCHW for batch in draw(judges[0].loaded.modules.view_policy, loaded_runs[0], seed)]
    policies = []
    with Progress("policies", total=len(judges)) as progress:
        for judge in judges:
            policy = judge.loaded.modules.view_policy
            budget = policy.config.budget if isinstance(policy, Viewmaker) else None
            views, pictures = [], []
            for factor in [1.0] if budget is None else times:
                used = with_budget(policy, factor) if isinstance(policy, Viewmaker) else policy
                for number in seeds:
                    viewed = [batch.views_BCHW for batch in draw(used, judge.loaded, number)]
                    views.append({"times": factor, "seed": number, "readings": read(viewed)})
                    pictures.append(small(viewed))
            plain_NHWC, *views_NHWC = as_shown(test, small(plain), *pictures)
            trained = next(number for number, view in enumerate(views) if view["times"] == 1.0)
            policies.append(
                {
                    "name": judge.name,
                    "kind": judge.loaded.modules.config.views.kind,
                    "step": judge.loaded.modules.step,
                    "budget": budget,
                    "probe": judge.heads.made_by,
                    "gain": difference_gain(views_NHWC[trained] - plain_NHWC),
                    "views": views,
                    "sheet": _sheet(views_NHWC),
                }
            )
            progress.advance()
    return {
        "samples": test.samples.index_B[shown_N].tolist(),
        "num_measured": len(rows_M),
        "labels": [
            {
                "title": test.manifest.labels[space].title or f"{space} label",
                "classes": test.class_names(space),
                "of_sample": label_M[space][: len(shown_N)].tolist(),
            }
            for space in spaces
        ],
        "times": times,
        "seeds": seeds,
        "size": plain_NHWC.shape[1:3],
        "plain": {"sheet": _sheet([plain_NHWC]), "readings": read(plain)},
        "policies": policies,
    }


def with_budget(viewmaker: Viewmaker, times: float) -> Viewmaker:
    """Return the same network with `times` its budget."""
    changed = copy.copy(viewmaker)
    changed.config = viewmaker.config.model_copy(update={"budget": times * viewmaker.config.budget})
    return changed


def _read(
    judges: Sequence[Judge], batches: Sequence[Tensor], label_M: Mapping[LabelSpace, Tensor], num: int
) -> list[list[dict[str, Any]]]:
    """Return the readings of the first `num` pictures (B, C, H, W) of `batches`, see `measure`."""
    readings: list[list[dict[str, Any]]] = [[] for _ in label_M]
    for judge in judges:
        encoder = judge.loaded.modules.encoder
        with frozen(encoder):
            features_MF = torch.cat([encoder.features(views_BCHW) for views_BCHW in batches])
        for of_label, (space, right_M) in zip(readings, label_M.items(), strict=True):
            head, right_M = judge.heads.by_label[space], right_M[: len(features_MF)]
            probability_NK = head.logits(features_MF[:num]).double().softmax(1).cpu()
            right_N = right_M[:num, None].clamp(min=0)
            read_M, has_label_M = head.classes(features_MF).cpu(), right_M != NO_LABEL
            of_label.append(
                {
                    "read": read_M[:num].tolist(),
                    "sure": _numbers(probability_NK.amax(1)),
                    "right": _numbers(probability_NK.gather(1, right_N)[:, 0]),
                    "accuracy": _numbers((read_M == right_M)[has_label_M].double().mean()[None])[0],
                }
            )
    return readings


def _numbers(values_N: Tensor) -> list[Measured]:
    return [round(value, _DIGITS) if math.isfinite(value) else None for value in values_N.tolist()]


def _sheet(rows_NHWC: Sequence[NDArray[np.float32]]) -> str:
    """Return a PNG in base64 with the pictures (N, H, W, 3) of each row side by side."""
    pixels = np.concatenate([np.concatenate(list(row_NHWC), axis=1) for row_NHWC in rows_NHWC])
    picture = Image.fromarray(np.round(255 * np.nan_to_num(pixels).clip(0, 1)).astype(np.uint8))
    return base64.b64encode(to_png(picture)).decode()


def page(state: Mapping[str, Any]) -> str:
    """Return the page as HTML. No text of the state can become markup."""
    data = json.dumps(state, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return _TEMPLATE.read_text(encoding="utf-8").replace("{{ state }}", data)


class PlayAnalysis(Analysis):
    """The analysis that writes a page in place of numbers and a picture."""

    def analyze(self, runs: Sequence[LoadedRun], *, config: Schema, out: Path | None = None) -> list[Path]:
        """Write the page to `out`, by default to RUN_DIR/analysis/play.html of the first run, and return its path."""
        path = out or runs[0].run_dir.analysis / "play.html"
        write_atomically(path, page(self.measure(runs, config)))
        return [path]


ANALYSIS = PlayAnalysis("play", PlayConfig, measure, compares_runs=True)
